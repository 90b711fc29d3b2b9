/* How far two arrays are apart: every sum, extreme and count of a pair of arrays, in one pass over both.
 *
 * Python loads this with ctypes (kernel.py). The file is compiled once for each level of the processor's instructions
 * (-DLEVEL=v4: the loops over elements) and once without LEVEL: what calls these loops and puts together what they
 * find.
 *
 * Sums run in float64, and are added up block after block in one order: the result is the same on every run, whatever
 * the number of threads. Where the sums of a block cannot tell what is asked (the spread of values around a mean far
 * from zero, the product of norms far apart) the block is gone over once more while it is in the cache. One that holds
 * values that are not finite is measured without them. Values whose squares leave float64 take a second pass, scaled by
 * a power of two.
 *
 * Not for -ffast-math: the order of additions is a promise here, and NaN and infinity are values.
 */

#include "kernel.h"

#include <math.h>
#include <stdlib.h>

/* Tests make these smaller. PIECE has to be a multiple of what `sums` takes steps of, and each the next one's divisor. */
#ifndef PIECE
#define PIECE 1024   /* elements that are converted at once: they stay in the first-level cache */
#define BLOCK 16384  /* elements whose sums are looked at together: two blocks of float64 fit in a cache of 256 KiB */
#define STRIPE 65536 /* elements that one thread takes at once */
#endif
/* Means or norms that are so many times smaller or larger than what they are subtracted from cost the first sums three
 * of their sixteen digits at most. */
#define LARGEST_RATIO 64
/* Within these magnitudes squares, and products of two sums of squares, keep clear of the ends of float64's range. */
#define SMALLEST 0x1p-200
#define LARGEST 0x1p+200

/* ---- Sums --------------------------------------------------------------------------------------------------------- */

/* A sum, and what was lost to rounding on the way. */
struct twofold {
    double sum, lost;
};

static void add(struct twofold *to, double value) {
    double sum = to->sum + value, kept = sum - to->sum;
    to->lost += (to->sum - (sum - kept)) + (value - kept);
    to->sum = sum;
}

static void add_all(struct twofold *to, const struct twofold *other) {
    add(to, other->sum);
    to->lost += other->lost;
}

static double value_of(const struct twofold *number) { return number->sum + number->lost; }

/* One of the arrays, as far as its pairs are finite: `rest` is the sum of x - center, `spread` the sum of the squares
 * of x - mean. The center is zero unless the mean is large beside the spread. */
struct side {
    double low, high, center, spread;
    struct twofold rest, squares;
    int64_t nonfinite;
};

/* What is found of some elements. `place` is that of the first element of the block with the largest distance; `found`
 * that of the distance itself, where one of the arrays is written over. */
struct part {
    int64_t pairs, nonfinite_differ, place, found;
    struct side x, y;
    double max_abs;
    struct twofold abs_d, dd, product;
};

static void merge_sides(struct side *into, int64_t count, const struct side *from, int64_t more) {
    double shift = from->center - into->center;
    double apart = (shift + value_of(&from->rest) / more) - value_of(&into->rest) / count;
    into->low = from->low < into->low ? from->low : into->low;
    into->high = from->high > into->high ? from->high : into->high;
    /* Chan, Golub and LeVeque: the spread of two sets is theirs and that of their means. */
    into->spread += from->spread + apart * apart * ((double)count * more / ((double)count + more));
    add_all(&into->rest, &from->rest);
    add(&into->rest, shift * more);
    add_all(&into->squares, &from->squares);
    into->nonfinite += from->nonfinite;
}

static void merge(struct part *into, const struct part *from) {
    if (into->pairs == 0 || from->pairs == 0) { /* one has nothing but counts */
        struct part counts = from->pairs ? *into : *from;
        if (from->pairs) *into = *from;
        into->x.nonfinite += counts.x.nonfinite, into->y.nonfinite += counts.y.nonfinite;
        into->nonfinite_differ += counts.nonfinite_differ;
        return;
    }
    merge_sides(&into->x, into->pairs, &from->x, from->pairs);
    merge_sides(&into->y, into->pairs, &from->y, from->pairs);
    add_all(&into->abs_d, &from->abs_d), add_all(&into->dd, &from->dd), add_all(&into->product, &from->product);
    if (from->max_abs > into->max_abs) {
        into->max_abs = from->max_abs, into->place = from->place, into->found = from->found;
    }
    into->nonfinite_differ += from->nonfinite_differ;
    into->pairs += from->pairs;
}

/* ---- Some elements ------------------------------------------------------------------------------------------------ */

struct job {
    const struct loops *loops;
    enum type type_x, type_y;
    const char *x, *y;
    int64_t count;
    char *to; /* x or y, which is given the other one's elements; NULL: neither */
    /* Powers of two: of x, of y, and of their difference, before and after it is taken. */
    int scaled;
    double scale_x, scale_y, scale_before, scale_after;
};

#define SIZE(name, c_type) sizeof(c_type),
static const size_t SIZES[] = {TYPES(SIZE, SIZE)};
#define YES(name, c_type) 1,
#define NO(name, c_type) 0,
static const char IS_NARROW[] = {TYPES(YES, NO)};

static int is_finite(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

/* 0 for what is finite; NaN, and both infinities, have a number each. */
static int kind_of(double value) { return is_finite(value) ? 0 : value > 0 ? 1 : value < 0 ? 2 : 3; }

static void load(const struct loops *loops, enum type type, const char *from, int64_t count, double *to) {
    if (!IS_NARROW[type]) {
        loops->of[type].load(from, count, to);
        return;
    }
    float floats[PIECE];
    loops->of[type].load(from, count, floats);
    for (int64_t i = 0; i < count; i++) to[i] = floats[i];
}

static void multiply_into(struct twofold *product, const struct loops *loops, enum type type, const char *x,
                          const char *y, int64_t count) {
    for (int64_t at = 0; at < count; at += PIECE) {
        int64_t some = count - at < PIECE ? count - at : PIECE;
        double each_x[PIECE], each_y[PIECE], lanes[8] = {0};
        load(loops, type, x + at * SIZES[type], some, each_x), load(loops, type, y + at * SIZES[type], some, each_y);
        for (int64_t i = 0; i < some; i++) lanes[i % 8] += each_x[i] * each_y[i];
        for (int i = 0; i < 8; i++) add(product, lanes[i]);
    }
}

/* The elements that are left when `sums` and `spread` have taken their steps. */
static void finish_sums(struct sums *found, const struct loops *loops, enum type type, const char *x, const char *y,
                        int64_t count) {
    double each_x[PIECE], each_y[PIECE];
    load(loops, type, x, count, each_x), load(loops, type, y, count, each_y);
    for (int64_t i = 0; i < count; i++) {
        double a = each_x[i], b = each_y[i], d = b - a, distance = fabs(d);
        found->x += a, found->y += b, found->xx += a * a, found->yy += b * b, found->dd += d * d;
        found->abs_d += distance;
        found->low_x = a < found->low_x ? a : found->low_x, found->high_x = a > found->high_x ? a : found->high_x;
        found->low_y = b < found->low_y ? b : found->low_y, found->high_y = b > found->high_y ? b : found->high_y;
        found->max_abs = distance > found->max_abs ? distance : found->max_abs;
    }
}

static void measure_side(struct side *side, const struct loops *loops, enum type type, const char *x, int64_t count,
                         double total, double squares, double low, double high) {
    *side = (struct side){.low = low, .high = high, .rest.sum = total, .squares.sum = squares};
    if (low == high) {
        side->center = low, side->rest.sum = 0;
        return;
    }
    side->spread = (squares * count - total * total) / count;
    if (loops->of[type].spread && side->spread * LARGEST_RATIO < squares) {
        double rest = 0, around = 0, each[PIECE];
        int64_t whole = count / loops->of[type].step * loops->of[type].step;
        side->center = total / count;
        if (whole) loops->of[type].spread(x, whole, side->center, &rest, &around);
        load(loops, type, x + whole * SIZES[type], count - whole, each);
        for (int64_t i = 0; i < count - whole; i++) {
            double off = each[i] - side->center;
            rest += off, around += off * off;
        }
        side->rest.sum = rest, side->spread = around - rest * rest / count;
    }
    if (!(side->spread > 0)) side->spread = 0;
}

/* Measure elements of one type that has loops; 0 where they are not all finite, or their squares are not. */
static int measure_elements(struct part *part, const struct loops *loops, enum type type, const char *x, const char *y,
                            int64_t count) {
    struct sums found = {.low_x = INFINITY, .high_x = -INFINITY, .low_y = INFINITY, .high_y = -INFINITY};
    int64_t whole = count / loops->of[type].step * loops->of[type].step;
    if (whole) loops->of[type].sums(x, y, whole, &found);
    if (whole < count) {
        finish_sums(&found, loops, type, x + whole * SIZES[type], y + whole * SIZES[type], count - whole);
    }
    *part = (struct part){.pairs = count, .max_abs = found.max_abs, .abs_d.sum = found.abs_d, .dd.sum = found.dd};
    measure_side(&part->x, loops, type, x, count, found.x, found.xx, found.low_x, found.high_x);
    measure_side(&part->y, loops, type, y, count, found.y, found.yy, found.low_y, found.high_y);
    double smaller = found.xx < found.yy ? found.xx : found.yy, larger = found.xx < found.yy ? found.yy : found.xx;
    if (smaller * LARGEST_RATIO >= larger) {
        /* As exact as the products themselves while the norms are alike, and finer where x and y are nearly the same. */
        part->product.sum = (found.xx + found.yy - found.dd) / 2;
    } else if (smaller > 0) {
        multiply_into(&part->product, loops, type, x, y, count);
    }
    return is_finite(found.xx) && is_finite(found.yy);
}

/* |y - x|, scaled. One function for all who need it: they look for each other's results. */
__attribute__((noinline)) static void take_distances(const struct job *job, const double *x, const double *y,
                                                     int64_t count, double *distances) {
    double before = job->scale_before, after = job->scale_after;
    for (int64_t i = 0; i < count; i++) distances[i] = fabs(y[i] * before - x[i] * before) * after;
}

/* Measure up to PIECE elements of any type and value. */
static void measure_anything(struct part *part, const struct job *job, const char *x, const char *y, int64_t count) {
    static const double zeros[PIECE];
    double each_x[PIECE], each_y[PIECE], distances[PIECE];
    struct part counts = {0};
    int64_t pairs = 0;
    load(job->loops, job->type_x, x, count, each_x), load(job->loops, job->type_y, y, count, each_y);
    for (int64_t i = 0; i < count; i++) {
        double a = each_x[i], b = each_y[i];
        int kind_a = kind_of(a), kind_b = kind_of(b);
        each_x[pairs] = a, each_y[pairs] = b;
        pairs += !kind_a && !kind_b;
        counts.x.nonfinite += kind_a != 0, counts.y.nonfinite += kind_b != 0;
        counts.nonfinite_differ += kind_a != kind_b;
    }
    *part = (struct part){0};
    if (pairs && job->scaled) {
        struct part apart;
        take_distances(job, each_x, each_y, pairs, distances);
        for (int64_t i = 0; i < pairs; i++) each_x[i] *= job->scale_x, each_y[i] *= job->scale_y;
        measure_elements(&apart, job->loops, F64, (const char *)zeros, (const char *)distances, pairs);
        measure_elements(part, job->loops, F64, (const char *)each_x, (const char *)each_y, pairs);
        part->max_abs = apart.max_abs, part->abs_d = apart.abs_d, part->dd = apart.dd;
    } else if (pairs) {
        measure_elements(part, job->loops, F64, (const char *)each_x, (const char *)each_y, pairs);
    }
    part->x.nonfinite = counts.x.nonfinite, part->y.nonfinite = counts.y.nonfinite;
    part->nonfinite_differ = counts.nonfinite_differ;
}

/* Elements as their type's loops take them: as they are, or in the buffer. */
static const char *loaded(const struct loops *loops, enum type type, enum type as, const char *from, int64_t count,
                          double *buffer) {
    if (type == as) return from;
    if (as == F64) load(loops, type, from, count, buffer);
    else loops->of[type].load(from, count, buffer);
    return (const char *)buffer;
}

static void measure_block(struct part *part, const struct job *job, int64_t at, int64_t count) {
    const struct loops *loops = job->loops;
    size_t size_x = SIZES[job->type_x], size_y = SIZES[job->type_y];
    const char *x = job->x + at * size_x, *y = job->y + at * size_y;
    int alike = job->type_x == job->type_y && loops->of[job->type_x].sums, unfit = job->scaled;
    if (alike && !unfit) {
        unfit = !measure_elements(part, loops, job->type_x, x, y, count);
        if (!unfit) goto measured;
    }
    *part = (struct part){0};
    enum type as = IS_NARROW[job->type_x] && IS_NARROW[job->type_y] ? F32 : F64;
    for (int64_t done = 0; done < count; done += PIECE) {
        int64_t some = count - done < PIECE ? count - done : PIECE;
        const char *from_x = x + done * size_x, *from_y = y + done * size_y;
        struct part piece;
        double each_x[PIECE], each_y[PIECE];
        if (unfit || !measure_elements(&piece, loops, as, loaded(loops, job->type_x, as, from_x, some, each_x),
                                       loaded(loops, job->type_y, as, from_y, some, each_y), some)) {
            measure_anything(&piece, job, from_x, from_y, some);
        }
        merge(part, &piece);
    }
measured:
    part->place = at;
}

/* Where in a block the distance is first so large; -1 if nowhere. */
static int64_t find_distance(const struct job *job, int64_t block, double largest) {
    const struct loops *loops = job->loops;
    size_t size_x = SIZES[job->type_x], size_y = SIZES[job->type_y];
    int64_t end = job->count - block < BLOCK ? job->count : block + BLOCK;
    if (job->type_x == job->type_y && loops->of[job->type_x].find && !job->scaled) {
        int step = loops->of[job->type_x].step;
        int64_t whole = (end - block) / step * step;
        block += loops->of[job->type_x].find(job->x + block * size_x, job->y + block * size_y, whole, largest);
        end = end - block < LOOKED_AT ? end : block + LOOKED_AT;
    }
    for (int64_t at = block; at < end; at += PIECE) {
        int64_t some = end - at < PIECE ? end - at : PIECE;
        double each_x[PIECE], each_y[PIECE], distances[PIECE];
        load(loops, job->type_x, job->x + at * size_x, some, each_x);
        load(loops, job->type_y, job->y + at * size_y, some, each_y);
        take_distances(job, each_x, each_y, some, distances);
        for (int64_t i = 0; i < some; i++)
            if (distances[i] == largest) return at + i;
    }
    return -1;
}

/* `least`: no smaller distance is looked for, because there is one before. */
static void measure_stripe(struct part *part, const struct job *job, int64_t stripe, double least) {
    int64_t end = (stripe + 1) * STRIPE < job->count ? (stripe + 1) * STRIPE : job->count;
    *part = (struct part){0};
    for (int64_t at = stripe * STRIPE; at < end; at += BLOCK) {
        struct part block;
        int64_t some = end - at < BLOCK ? end - at : BLOCK;
        measure_block(&block, job, at, some);
        if (job->to) {
            size_t size = SIZES[job->type_x];
            int is_largest = block.pairs && block.max_abs > least && (!part->pairs || block.max_abs > part->max_abs);
            if (is_largest) block.found = find_distance(job, at, block.max_abs);
            memcpy(job->to + at * size, (job->to == job->y ? job->x : job->y) + at * size, some * size);
        }
        if (at == stripe * STRIPE) *part = block;
        else merge(part, &block);
    }
}

/* ---- Sorted elements ---------------------------------------------------------------------------------------------- */

/* Sort by one byte of the bits after another, the lowest first: on AMD's Zen 4 several times faster than numpy, whose
 * AVX-512 code stores selected elements, which is slow there. The bits of a float, its sign flipped and all others too
 * if it is negative, are in the order of the numbers; NaN loses its sign and is last. Bytes that all elements share take
 * no pass. */
#define SORT(float_type, bits_type, sort_name, quantiles_name)                                                         \
    static void sort_name(float_type *values, int64_t count, bits_type *spare) {                                       \
        const int top = 8 * sizeof(bits_type) - 1;                                                                     \
        int64_t counts[sizeof(bits_type)][256] = {{0}};                                                                \
        bits_type *from = spare, *to = (void *)values;                                                                 \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            bits_type bits;                                                                                            \
            memcpy(&bits, values + i, sizeof bits);                                                                    \
            if (values[i] != values[i]) bits &= ~(bits_type)0 >> 1;                                                    \
            bits ^= bits >> top ? ~(bits_type)0 : (bits_type)1 << top;                                                 \
            from[i] = bits;                                                                                            \
            for (size_t byte = 0; byte < sizeof bits; byte++) counts[byte][bits >> 8 * byte & 255]++;                  \
        }                                                                                                              \
        for (size_t byte = 0; byte < sizeof(bits_type); byte++) {                                                      \
            int64_t *places = counts[byte], place = 0;                                                                 \
            if (places[from[0] >> 8 * byte & 255] == count) continue;                                                  \
            for (int digit = 0; digit < 256; digit++) {                                                                \
                int64_t some = places[digit];                                                                          \
                places[digit] = place, place += some;                                                                  \
            }                                                                                                          \
            for (int64_t i = 0; i < count; i++) to[places[from[i] >> 8 * byte & 255]++] = from[i];                     \
            bits_type *last = from;                                                                                    \
            from = to, to = last;                                                                                      \
        }                                                                                                              \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            bits_type bits = from[i];                                                                                  \
            bits ^= bits >> top ? (bits_type)1 << top : ~(bits_type)0;                                                 \
            memcpy(values + i, &bits, sizeof bits);                                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    /* The values at ascending places of the sorted ones, then the magnitudes at these places of theirs: negative      \
     * values from the last to the first are one sorted array of magnitudes, the others a second one. */               \
    static void quantiles_name(const float_type *values, int64_t count, const int64_t *places, int64_t place_count,    \
                               double *found) {                                                                        \
        int64_t low = 0, negative = count;                                                                             \
        while (low < negative) {                                                                                       \
            int64_t middle = low + (negative - low) / 2;                                                               \
            if (values[middle] < 0) low = middle + 1;                                                                  \
            else negative = middle;                                                                                    \
        }                                                                                                              \
        const float_type *others = values + negative;                                                                  \
        low = 0;                                                                                                       \
        for (int64_t each = 0; each < place_count; each++) {                                                           \
            /* How many of those before this place are negative. */                                                    \
            int64_t place = places[each], high = place < negative ? place : negative;                                  \
            if (low < place - (count - negative)) low = place - (count - negative);                                    \
            while (low < high) {                                                                                       \
                int64_t middle = low + (high - low) / 2;                                                               \
                if (-values[negative - 1 - middle] < others[place - middle - 1]) low = middle + 1;                     \
                else high = middle;                                                                                    \
            }                                                                                                          \
            int is_negative = low < negative &&                                                                        \
                              (place - low >= count - negative || -values[negative - 1 - low] < others[place - low]);  \
            found[each] = values[place];                                                                               \
            found[place_count + each] = is_negative ? -values[negative - 1 - low] : fabs(others[place - low]);         \
        }                                                                                                              \
    }

SORT(float, uint32_t, sort_floats, quantiles_of_floats)
SORT(double, uint64_t, sort_doubles, quantiles_of_doubles)

/* ---- The processor's own settings --------------------------------------------------------------------------------- */

/* Flushing small numbers to zero, and other ways of rounding, are per thread; torch offers the first to its users. */
#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned int modes;
static modes set_modes(modes to) {
    modes before = _mm_getcsr();
    _mm_setcsr(to);
    return before;
}
#define USUAL_MODES 0x1f80u
#else
typedef uint64_t modes;
static modes set_modes(modes to) {
    modes before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"(to));
    return before;
}
#define USUAL_MODES 0
#endif

/* ---- All elements ------------------------------------------------------------------------------------------------- */

struct stripes {
    const struct job *job;
    struct part *parts;
};

static void measure_one_of(void *context, int64_t stripe) {
    struct stripes *stripes = context;
    modes before = set_modes(USUAL_MODES);
    measure_stripe(&stripes->parts[stripe], stripes->job, stripe, -1);
    set_modes(before);
}

static void measure_all(struct part *total, const struct job *job, int threads) {
    int64_t count = (job->count + STRIPE - 1) / STRIPE;
    struct part *parts = threads > 1 && count > 1 ? malloc(count * sizeof *parts) : 0;
    if (parts) graftlab_share(threads, count, measure_one_of, &(struct stripes){job, parts});
    *total = (struct part){0};
    for (int64_t stripe = 0; stripe < count; stripe++) {
        struct part part;
        if (!parts) measure_stripe(&part, job, stripe, total->pairs ? total->max_abs : -1);
        merge(total, parts ? &parts[stripe] : &part);
    }
    free(parts);
}

/* ---- From sums to statistics -------------------------------------------------------------------------------------- */

/* What Python asks and is given. The results' names are DiffStats' own; a place is counted in elements, -1 is none. */
#define RESULTS(FLOAT, COUNT)                                                                                          \
    COUNT(numel) FLOAT(rel_l2) FLOAT(rel_diff) FLOAT(max_abs) COUNT(max_abs_index) FLOAT(mean_abs) FLOAT(cosine)       \
    COUNT(nonfinite_baseline) COUNT(nonfinite_target) COUNT(nonfinite_differ) FLOAT(mean_baseline) FLOAT(std_baseline) \
    FLOAT(min_baseline) FLOAT(max_baseline) FLOAT(mean_target) FLOAT(std_target) FLOAT(min_target) FLOAT(max_target)

#define FLOAT_FIELD(name) double name;
#define COUNT_FIELD(name) int64_t name;
struct results {
    RESULTS(FLOAT_FIELD, COUNT_FIELD)
};
struct call {
    const void *x, *y;
    int64_t count, types, threads;
    int64_t copy; /* 1: y is given x's elements when they are measured, 2: x is given y's. Of one narrow type alone */
    struct results results;
};

static double magnitude(double low, double high) { return fabs(low) > fabs(high) ? fabs(low) : fabs(high); }

/* The power of two by which to divide before squaring: 0 for what may be squared as it is. */
static int exponent_of(double number) {
    int exponent;
    if (number == 0 || (number >= SMALLEST && number <= LARGEST)) return 0;
    if (!is_finite(number)) return 1000;
    frexp(number, &exponent);
    return exponent > 1000 ? 1000 : exponent < -1000 ? -1000 : exponent;
}

/* dd / (xx + yy), where each has its own power of two. */
static double ratio(double dd, int exponent_d, double xx, int exponent_x, double yy, int exponent_y) {
    int of_d, of_x, of_y;
    dd = frexp(dd, &of_d), xx = frexp(xx, &of_x), yy = frexp(yy, &of_y);
    of_d += 2 * exponent_d, of_x += 2 * exponent_x, of_y += 2 * exponent_y;
    int most = xx == 0 ? of_y : yy == 0 || of_x > of_y ? of_x : of_y;
    return ldexp(dd / (ldexp(xx, of_x - most) + ldexp(yy, of_y - most)), of_d - most);
}

static void summarize(struct results *results, const struct part *part, int exponent_x, int exponent_y, int exponent_d) {
    double pairs = (double)part->pairs, dd = value_of(&part->dd), product = value_of(&part->product);
    double xx = value_of(&part->x.squares), yy = value_of(&part->y.squares);
    if (xx == 0 || yy == 0) {
        results->rel_l2 = xx != 0 ? 1 : yy != 0 ? INFINITY : 0;
        results->rel_diff = xx != 0 || yy != 0;
        results->cosine = xx == yy;
    } else {
        double cosine = sqrt((product / xx) * (product / yy));
        results->rel_l2 = ldexp(sqrt(dd / xx), exponent_d - exponent_x);
        results->rel_diff = fmin(ratio(dd, exponent_d, xx, exponent_x, yy, exponent_y), 2);
        results->cosine = copysign(fmin(cosine, 1), product);
    }
    results->max_abs = ldexp(part->max_abs, exponent_d);
    results->mean_abs = ldexp(value_of(&part->abs_d) / pairs, exponent_d);
    results->mean_baseline = ldexp(part->x.center + value_of(&part->x.rest) / pairs, exponent_x);
    results->mean_target = ldexp(part->y.center + value_of(&part->y.rest) / pairs, exponent_y);
    results->std_baseline = ldexp(sqrt(part->x.spread / pairs), exponent_x);
    results->std_target = ldexp(sqrt(part->y.spread / pairs), exponent_y);
}

/* ---- What Python calls -------------------------------------------------------------------------------------------- */

/* Returns 0, or 1 if the place of the largest distance was not found again: a fault that must not go unseen. */
static int measure(const struct loops *loops, struct call *call) {
    struct results *results = &call->results;
    struct job job = {.loops = loops, .type_x = call->types / TYPE_COUNT, .type_y = call->types % TYPE_COUNT,
                      .x = call->x, .y = call->y, .count = call->count, .scale_before = 1, .scale_after = 1};
    struct part first, second, *part = &first;
    if (call->copy) {
        /* The squares of narrow types need no second pass, for which both would have to be there still. */
        if (job.type_x != job.type_y || !IS_NARROW[job.type_x]) return 1;
        job.to = (char *)(call->copy == 1 ? call->y : call->x);
    }
    modes before = set_modes(USUAL_MODES);
    measure_all(&first, &job, call->threads);
    *results = (struct results){.numel = call->count,
                                .max_abs_index = -1,
                                .nonfinite_baseline = first.x.nonfinite,
                                .nonfinite_target = first.y.nonfinite,
                                .nonfinite_differ = first.nonfinite_differ};
    if (first.pairs) {
        int exponent_x = exponent_of(magnitude(first.x.low, first.x.high));
        int exponent_y = exponent_of(magnitude(first.y.low, first.y.high));
        int exponent_d = exponent_of(first.max_abs);
        if (exponent_x || exponent_y || exponent_d) {
            job.scaled = 1, job.scale_x = ldexp(1, -exponent_x), job.scale_y = ldexp(1, -exponent_y);
            /* Large values before they are subtracted, small differences after. */
            *(exponent_d > 0 ? &job.scale_before : &job.scale_after) = ldexp(1, -exponent_d);
            measure_all(&second, &job, call->threads);
            part = &second;
        }
        summarize(results, part, exponent_x, exponent_y, exponent_d);
        results->min_baseline = first.x.low, results->max_baseline = first.x.high;
        results->min_target = first.y.low, results->max_target = first.y.high;
        results->max_abs_index = job.to ? part->found : find_distance(&job, part->place, part->max_abs);
    } else {
#define NOTHING(name) results->name = NAN;
#define KEEP(name)
        RESULTS(NOTHING, KEEP)
    }
    set_modes(before);
    return first.pairs && results->max_abs_index < 0;
}

/* The moments of `count` elements, at least one. Elements of one block have the factors of their places in it, and each
 * block's projections are multiplied by further factors, [block][FACTORS]. */
struct moments_call {
    const char *x;
    int64_t count, type;
    const double *factors, *of_blocks;
    int64_t block;
    struct moments found;
};

static int measure_moments(const struct loops *loops, struct moments_call *call) {
    struct moments *found = &call->found;
    size_t size = SIZES[call->type];
    modes before = set_modes(USUAL_MODES);
    *found = (struct moments){.low = INFINITY, .high = -INFINITY};
    for (int64_t at = 0; at < call->count; at += call->block) {
        int64_t end = call->count - at < call->block ? call->count : at + call->block;
        double whole[FACTORS], each[PIECE];
        memcpy(whole, found->projections, sizeof whole);
        memset(found->projections, 0, sizeof whole);
        for (int64_t from = at; from < end; from += PIECE) {
            int64_t some = end - from < PIECE ? end - from : PIECE;
            const char *x = loaded(loops, call->type, F64, call->x + from * size, some, each);
            loops->moments((const double *)x, some, call->factors + (from - at), call->block, found);
        }
        for (int k = 0; k < FACTORS; k++) {
            found->projections[k] = whole[k] + found->projections[k] * call->of_blocks[at / call->block * FACTORS + k];
        }
    }
    set_modes(before);
    return 0;
}

/* Sort `count` elements, at least one. `sorted` has room for all of them, as float for narrow types and double for wide
 * ones; or it is NULL. `found` are the values at ascending places, then the magnitudes there, right only without NaN.
 * Returns 1 if there is no memory. */
struct sort_call {
    const char *x;
    int64_t count, type;
    void *sorted;
    const int64_t *places;
    int64_t place_count;
    double found[];
};

static int sort(const struct loops *loops, struct sort_call *call) {
    int is_narrow = IS_NARROW[call->type];
    size_t size = call->count * (is_narrow ? sizeof(float) : sizeof(double));
    char *spare = malloc(call->sorted ? size : 2 * size);
    if (!spare) return 1;
    void *sorted = call->sorted ? call->sorted : spare + size;
    modes before = set_modes(USUAL_MODES);
    loops->of[call->type].load(call->x, call->count, sorted);
    if (is_narrow) {
        sort_floats(sorted, call->count, (void *)spare);
        quantiles_of_floats(sorted, call->count, call->places, call->place_count, call->found);
    } else {
        sort_doubles(sorted, call->count, (void *)spare);
        quantiles_of_doubles(sorted, call->count, call->places, call->place_count, call->found);
    }
    set_modes(before);
    free(spare);
    return 0;
}

#define EXPORT __attribute__((visibility("default")))
#define OF_LEVEL(level)                                                                                                \
    extern const struct loops graftlab_loops_##level HIDDEN;                                                           \
    EXPORT int graftlab_measure_##level(struct call *call) { return measure(&graftlab_loops_##level, call); }          \
    EXPORT int graftlab_moments_##level(struct moments_call *call) {                                                   \
        return measure_moments(&graftlab_loops_##level, call);                                                         \
    }                                                                                                                  \
    EXPORT int graftlab_sort_##level(struct sort_call *call) { return sort(&graftlab_loops_##level, call); }

#if defined(__x86_64__)
OF_LEVEL(v2)
OF_LEVEL(v3)
OF_LEVEL(v4)
#else
OF_LEVEL(neon)
#endif

/* The types and the results in their order, so that Python need not repeat it; and which sources this was made from, for what. */
#define TYPE_NAME(name, c_type) #name "\n"
#define FLOAT_NAME(name) "d " #name "\n"
#define COUNT_NAME(name) "q " #name "\n"
EXPORT const char *graftlab_types(void) { return TYPES(TYPE_NAME, TYPE_NAME); }
EXPORT const char *graftlab_results(void) { return RESULTS(FLOAT_NAME, COUNT_NAME); }
EXPORT const char *graftlab_made(void) { return "graftlab kernel made from " MADE; }
