/* Threads that share the tasks of a job: made once per process, as many as were ever asked for, asleep between jobs. */

#include "kernel.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#define STACK (1 << 20)

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t called, left;
    int threads; /* that there are, beside those that call */
    int wanted;  /* that may still join the job */
    int working; /* that have joined and not left */
    void (*work)(void *context, int64_t task);
    void *context;
    int64_t tasks;
    atomic_llong next;
};

#define NO_THREADS                                                                                                     \
    { .lock = PTHREAD_MUTEX_INITIALIZER, .called = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER }

static struct pool pool = NO_THREADS;
static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A forked child has none of its parent's threads, and perhaps locks that these had taken. */
static void forget_threads(void) {
    pool = (struct pool)NO_THREADS;
    in_use = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

static void watch_forks(void) { pthread_atfork(0, 0, forget_threads); }

static void take_tasks(void) {
    for (int64_t task; (task = atomic_fetch_add(&pool.next, 1)) < pool.tasks;) pool.work(pool.context, task);
}

static void *serve(void *ignored) {
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.wanted) pthread_cond_wait(&pool.called, &pool.lock);
        pool.wanted--, pool.working++;
        pthread_mutex_unlock(&pool.lock);
        take_tasks();
        pthread_mutex_lock(&pool.lock);
        if (--pool.working == 0) pthread_cond_signal(&pool.left);
    }
    return ignored;
}

static int add_thread(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes)) return 0;
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads that Python knows */
    int made = !pthread_create(&thread, &attributes, serve, 0);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    pthread_attr_destroy(&attributes);
    pool.threads += made;
    return made;
}

HIDDEN void graftlab_share(int threads, int64_t tasks, void (*work)(void *context, int64_t task), void *context) {
    int helpers = (int)(threads < tasks ? threads : tasks) - 1;
    pthread_once(&once, watch_forks);
    /* Two jobs at once would fight for the same cores: the second one keeps to its own thread. */
    if (helpers < 1 || pthread_mutex_trylock(&in_use)) {
        for (int64_t task = 0; task < tasks; task++) work(context, task);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    while (pool.threads < helpers && add_thread()) continue;
    pool.work = work, pool.context = context, pool.tasks = tasks, pool.next = 0;
    pool.wanted = helpers;
    for (int i = 0; i < helpers; i++) pthread_cond_signal(&pool.called);
    pthread_mutex_unlock(&pool.lock);
    take_tasks();
    pthread_mutex_lock(&pool.lock);
    pool.wanted = 0; /* who has not come yet need not come any more */
    while (pool.working) pthread_cond_wait(&pool.left, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&in_use);
}
