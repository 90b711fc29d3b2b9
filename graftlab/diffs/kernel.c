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

#include <stdint.h>
#include <string.h>

/* The types of elements, numbered as kernel.py does. NARROW: float32 holds all values; WIDE: float64 comes nearest. */
#define TYPES(NARROW, WIDE)                                                                                            \
    NARROW(F32, float) WIDE(F64, double) NARROW(BF16, uint16_t) NARROW(F16, uint16_t) NARROW(E4M3FN, uint8_t)          \
    NARROW(E5M2, uint8_t) NARROW(E4M3FNUZ, uint8_t) NARROW(E5M2FNUZ, uint8_t) NARROW(BOOL, uint8_t)                    \
    NARROW(U8, uint8_t) NARROW(I8, int8_t) NARROW(U16, uint16_t) NARROW(I16, int16_t) WIDE(U32, uint32_t)              \
    WIDE(I32, int32_t) WIDE(U64, uint64_t) WIDE(I64, int64_t)

#define NUMBER(name, c_type) name,
enum type { TYPES(NUMBER, NUMBER) TYPE_COUNT };

/* What one pass over pairs of elements finds; d is y - x. */
struct sums {
    double x, y, xx, yy, dd, abs_d;
    double low_x, high_x, low_y, high_y, max_abs;
};

struct loops {
    int step; /* `sums` and `spread` take multiples of so many elements */
    struct {
        /* Of arrays of this type; NULL: load both first. */
        void (*sums)(const void *x, const void *y, int64_t count, struct sums *found);
        /* Of x - center, and of its squares; NULL: the sums are exact. */
        void (*spread)(const void *x, int64_t count, double center, double *total, double *squares);
        /* To float32 for narrow types, to float64 for wide ones. */
        void (*load)(const void *from, int64_t count, void *to);
    } of[TYPE_COUNT];
};

#define JOIN_(one, other) one##other
#define JOIN(one, other) JOIN_(one, other)

#ifdef LEVEL
/* ==== The loops over elements, for one level ======================================================================== */

/* F and D are the registers' vectors of floats and doubles; an F makes HALVES of D. Several accumulators of one sum
 * (SETS) hide the time that an addition takes, where there are registers for them. */
#if defined(__aarch64__)
#include <arm_neon.h>
typedef float32x4_t F;
typedef float64x2_t D;
#define SETS 2
#define MIN_F vminq_f32
#define MAX_F vmaxq_f32
#define MIN_D vminq_f64
#define MAX_D vmaxq_f64
#define WIDEN(f, half) ((half) ? vcvt_high_f64_f32(f) : vcvt_f64_f32(vget_low_f32(f)))
#define ANY "w"
#elif defined(__AVX512F__)
#include <immintrin.h>
typedef __m256 F;
typedef __m512d D;
#define SETS 1
#define MIN_F _mm256_min_ps
#define MAX_F _mm256_max_ps
#define MIN_D _mm512_min_pd
#define MAX_D _mm512_max_pd
#define WIDEN(f, half) _mm512_cvtps_pd(f)
#define ANY "v"
#elif defined(__AVX2__)
#include <immintrin.h>
typedef __m256 F;
typedef __m256d D;
#define SETS 1
#define MIN_F _mm256_min_ps
#define MAX_F _mm256_max_ps
#define MIN_D _mm256_min_pd
#define MAX_D _mm256_max_pd
#define WIDEN(f, half) _mm256_cvtps_pd((half) ? _mm256_extractf128_ps(f, 1) : _mm256_castps256_ps128(f))
#define ANY "x"
#else
#include <emmintrin.h>
typedef __m128 F;
typedef __m128d D;
#define SETS 1
#define MIN_F _mm_min_ps
#define MAX_F _mm_max_ps
#define MIN_D _mm_min_pd
#define MAX_D _mm_max_pd
#define WIDEN(f, half) _mm_cvtps_pd((half) ? _mm_movehl_ps(f, f) : f)
#define ANY "x"
#endif

#define FLOATS ((int)(sizeof(F) / sizeof(float)))
#define DOUBLES ((int)(sizeof(D) / sizeof(double)))
#define HALVES (FLOATS / DOUBLES)
#define STEP (2 * FLOATS)
/* So many elements are added up before their sums join the block's. Short runs keep roundings from piling up. */
#define RUN (128 * DOUBLES)

typedef uint32_t BITS_F __attribute__((vector_size(sizeof(F))));
typedef uint64_t BITS_D __attribute__((vector_size(sizeof(D))));
typedef F FREE_F __attribute__((aligned(1), may_alias));
typedef D FREE_D __attribute__((aligned(1), may_alias));
typedef BITS_F FREE_BITS __attribute__((aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define ABS(d) ((D)((BITS_D)(d) & 0x7fffffffffffffffu))
/* Where multiplications and additions have units of their own, a fused multiplication by one lets both add. The asm
 * keeps the compiler from seeing the one. */
#if defined(__FMA__)
#define ONE(name)                                                                                                      \
    D name = (D){0} + 1.0;                                                                                             \
    __asm__("" : "+" ANY(name))
#define TIMES_ONE(value, one) ((value) * (one))
#else
#define ONE(name)
#define TIMES_ONE(value, one) (value)
#endif

/* A small float as a float: its magnitude is moved to where a float has its exponent and mantissa, and `scale` makes
 * up for the difference of the biases. Magnitudes from `infinite` on are infinite or NaN. */
INLINE float small_float(uint32_t bits, int width, int shift, float scale, uint32_t infinite) {
    uint32_t sign = bits >> (width - 1) << 31, magnitude = bits & ((1u << (width - 1)) - 1), moved = magnitude << shift;
    float value;
    memcpy(&value, &moved, sizeof value);
    value *= scale;
    memcpy(&moved, &value, sizeof value);
    moved |= sign | (magnitude >= infinite ? 0x7f800000u : 0);
    memcpy(&value, &moved, sizeof value);
    return value;
}

INLINE float bfloat16(uint16_t bits) {
    uint32_t moved = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &moved, sizeof value);
    return value;
}

#define NEVER 0x100u
#define F16_VALUE(b) small_float(b, 16, 13, 0x1p112f, 0x7c00)
#define E5M2_VALUE(b) small_float(b, 8, 21, 0x1p112f, 0x7c)
/* The only magnitude that is not finite is NaN: all ones in a float, too. */
#define E4M3FN_VALUE(b) small_float(b, 8, 20, 0x1p120f, 0x7f)
#define FNUZ_VALUE(b, shift, scale) ((b) == 0x80 ? __builtin_nanf("") : small_float(b, 8, shift, scale, NEVER))

#define LOADER(name, from_type, to_type, value)                                                                        \
    static void JOIN(name, _load)(const void *from, int64_t count, void *to) {                                         \
        const from_type *source = from;                                                                                \
        to_type *target = to;                                                                                          \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            from_type b = source[i];                                                                                   \
            target[i] = (to_type)(value);                                                                              \
        }                                                                                                              \
    }

LOADER(F32, float, float, b)
LOADER(F64, double, double, b)
LOADER(BF16, uint16_t, float, bfloat16(b))
LOADER(F16, uint16_t, float, F16_VALUE(b))
LOADER(E4M3FN, uint8_t, float, E4M3FN_VALUE(b))
LOADER(E5M2, uint8_t, float, E5M2_VALUE(b))
LOADER(E4M3FNUZ, uint8_t, float, FNUZ_VALUE(b, 20, 0x1p119f))
LOADER(E5M2FNUZ, uint8_t, float, FNUZ_VALUE(b, 21, 0x1p111f))
LOADER(BOOL, uint8_t, float, b != 0)
LOADER(U8, uint8_t, float, b)
LOADER(I8, int8_t, float, b)
LOADER(U16, uint16_t, float, b)
LOADER(I16, int16_t, float, b)
LOADER(U32, uint32_t, double, b)
LOADER(I32, int32_t, double, b)
LOADER(U64, uint64_t, double, b)
LOADER(I64, int64_t, double, b)

/* Two vectors of elements each; their order within does not matter. */
INLINE void F32_two(F *one, F *other, const float *from) {
    *one = *(const FREE_F *)from;
    *other = *(const FREE_F *)(from + FLOATS);
}

INLINE void F64_two(D *one, D *other, const double *from) {
    *one = *(const FREE_D *)from;
    *other = *(const FREE_D *)(from + DOUBLES);
}

INLINE void BF16_two(F *one, F *other, const uint16_t *from) {
    BITS_F words = *(const FREE_BITS *)from;
    *one = (F)(words << 16);
    *other = (F)(words & 0xffff0000u);
}

INLINE void F16_two(F *one, F *other, const uint16_t *from) {
#if defined(__F16C__)
    *one = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    *other = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + FLOATS)));
#elif defined(__aarch64__)
    *one = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
    *other = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + FLOATS)));
#else
    float values[STEP];
    F16_load(from, STEP, values);
    F32_two(one, other, values);
#endif
}

INLINE double sum_of(const D *set) {
    D all = set[0];
    for (int i = 1; i < SETS; i++) all += set[i];
    double lanes[DOUBLES], total = 0;
    memcpy(lanes, &all, sizeof lanes);
    for (int i = 0; i < DOUBLES / 2; i++) total += lanes[i] + lanes[i + DOUBLES / 2];
    return total;
}

#define ENDS(low, high, lows, highs, vector, element)                                                                  \
    do {                                                                                                               \
        element ends_[2][sizeof(vector) / sizeof(element)];                                                            \
        memcpy(ends_[0], &lows, sizeof(vector)), memcpy(ends_[1], &highs, sizeof(vector));                             \
        for (unsigned i_ = 1; i_ < sizeof(vector) / sizeof(element); i_++) {                                           \
            ends_[0][0] = ends_[0][i_] < ends_[0][0] ? ends_[0][i_] : ends_[0][0];                                     \
            ends_[1][0] = ends_[1][i_] > ends_[1][0] ? ends_[1][i_] : ends_[1][0];                                     \
        }                                                                                                              \
        (low) = ends_[0][0], (high) = ends_[1][0];                                                                     \
    } while (0)

#define ADD(set, a, b)                                                                                                 \
    do {                                                                                                               \
        D d_ = (b) - (a), m_ = ABS(d_);                                                                                \
        x[set] += TIMES_ONE(a, one), y[set] += TIMES_ONE(b, one);                                                      \
        xx[set] += (a) * (a), yy[set] += (b) * (b), dd[set] += d_ * d_;                                                \
        abs_d[set] += TIMES_ONE(m_, one), most = MAX_D(m_, most);                                                      \
    } while (0)

/* `narrow` is what two loads give: vectors of floats, of which each makes `halves` of doubles, or doubles already. */
#define FLOAT_LOOPS(name, c_type, vector, element, halves, WIDER, MIN, MAX)                                            \
    static void JOIN(name, _sums)(const void *from_x, const void *from_y, int64_t count, struct sums *found) {         \
        const c_type *each_x = from_x, *each_y = from_y;                                                               \
        const int64_t step = 2 * sizeof(vector) / sizeof(element);                                                     \
        D totals[6][SETS] = {{{0}}}, most = {0};                                                                       \
        vector x0, x1, y0, y1, low_x, high_x, low_y, high_y;                                                           \
        ONE(one);                                                                                                      \
        JOIN(name, _two)(&x0, &x1, each_x), JOIN(name, _two)(&y0, &y1, each_y);                                        \
        low_x = high_x = x0, low_y = high_y = y0;                                                                      \
        for (int64_t at = 0; at < count;) {                                                                            \
            int64_t end = count - at < RUN ? count : at + RUN;                                                         \
            D x[SETS] = {{0}}, y[SETS] = {{0}}, xx[SETS] = {{0}}, yy[SETS] = {{0}}, dd[SETS] = {{0}};                  \
            D abs_d[SETS] = {{0}};                                                                                     \
            for (; at < end; at += step) {                                                                             \
                JOIN(name, _two)(&x0, &x1, each_x + at), JOIN(name, _two)(&y0, &y1, each_y + at);                      \
                low_x = MIN(MIN(x0, x1), low_x), high_x = MAX(MAX(x0, x1), high_x);                                    \
                low_y = MIN(MIN(y0, y1), low_y), high_y = MAX(MAX(y0, y1), high_y);                                    \
                ADD(0, WIDER(x0, 0), WIDER(y0, 0));                                                                    \
                if (halves == 2) ADD(1 % SETS, WIDER(x0, 1), WIDER(y0, 1));                                            \
                ADD((halves == 1) % SETS, WIDER(x1, 0), WIDER(y1, 0));                                                 \
                if (halves == 2) ADD(1 % SETS, WIDER(x1, 1), WIDER(y1, 1));                                            \
            }                                                                                                          \
            for (int i = 0; i < SETS; i++) {                                                                           \
                totals[0][i] += x[i], totals[1][i] += y[i], totals[2][i] += xx[i], totals[3][i] += yy[i];              \
                totals[4][i] += dd[i], totals[5][i] += abs_d[i];                                                       \
            }                                                                                                          \
        }                                                                                                              \
        found->x = sum_of(totals[0]), found->y = sum_of(totals[1]), found->xx = sum_of(totals[2]);                     \
        found->yy = sum_of(totals[3]), found->dd = sum_of(totals[4]), found->abs_d = sum_of(totals[5]);                \
        ENDS(found->low_x, found->high_x, low_x, high_x, vector, element);                                             \
        ENDS(found->low_y, found->high_y, low_y, high_y, vector, element);                                             \
        double ignored;                                                                                                \
        ENDS(ignored, found->max_abs, most, most, D, double);                                                          \
        (void)ignored;                                                                                                 \
    }                                                                                                                  \
    static void JOIN(name, _spread)(const void *from, int64_t count, double center, double *total, double *squares) {  \
        const c_type *each = from;                                                                                     \
        const int64_t step = 2 * sizeof(vector) / sizeof(element);                                                     \
        D totals[2][SETS] = {{{0}}}, around = (D){0} + center;                                                         \
        for (int64_t at = 0; at < count;) {                                                                            \
            int64_t end = count - at < RUN ? count : at + RUN;                                                         \
            D x[SETS] = {{0}}, xx[SETS] = {{0}};                                                                       \
            for (; at < end; at += step) {                                                                             \
                vector x0, x1;                                                                                         \
                JOIN(name, _two)(&x0, &x1, each + at);                                                                 \
                D a = WIDER(x0, 0) - around, b = WIDER(x1, 0) - around;                                                \
                x[0] += a, xx[0] += a * a, x[1 % SETS] += b, xx[1 % SETS] += b * b;                                    \
                if (halves == 2) {                                                                                     \
                    a = WIDER(x0, 1) - around, b = WIDER(x1, 1) - around;                                              \
                    x[0] += a, xx[0] += a * a, x[1 % SETS] += b, xx[1 % SETS] += b * b;                                \
                }                                                                                                      \
            }                                                                                                          \
            for (int i = 0; i < SETS; i++) totals[0][i] += x[i], totals[1][i] += xx[i];                                \
        }                                                                                                              \
        *total = sum_of(totals[0]), *squares = sum_of(totals[1]);                                                      \
    }

#define AS_IT_IS(vector, half) (vector)
FLOAT_LOOPS(F32, float, F, float, HALVES, WIDEN, MIN_F, MAX_F)
FLOAT_LOOPS(BF16, uint16_t, F, float, HALVES, WIDEN, MIN_F, MAX_F)
FLOAT_LOOPS(F16, uint16_t, F, float, HALVES, WIDEN, MIN_F, MAX_F)
FLOAT_LOOPS(F64, double, D, double, 1, AS_IT_IS, MIN_D, MAX_D)

/* Integers of one byte: exact in 32 bits for a block of up to 2**15 elements, and left to the compiler to vectorise. */
#define BYTE_LOOPS(name, c_type, VALUE)                                                                                \
    static void JOIN(name, _sums)(const void *from_x, const void *from_y, int64_t count, struct sums *found) {         \
        const c_type *each_x = from_x, *each_y = from_y;                                                               \
        int32_t x = 0, y = 0, xx = 0, yy = 0, dd = 0, abs_d = 0;                                                       \
        int16_t low_x = 256, high_x = -256, low_y = 256, high_y = -256, most = 0;                                      \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            int16_t a = VALUE(each_x[i]), b = VALUE(each_y[i]), d = (int16_t)(b - a);                                  \
            int16_t distance = (int16_t)(d < 0 ? -d : d);                                                              \
            x += a, y += b, xx += a * a, yy += b * b, dd += d * d, abs_d += distance;                                  \
            low_x = a < low_x ? a : low_x, high_x = a > high_x ? a : high_x;                                           \
            low_y = b < low_y ? b : low_y, high_y = b > high_y ? b : high_y;                                           \
            most = distance > most ? distance : most;                                                                  \
        }                                                                                                              \
        *found = (struct sums){x, y, xx, yy, dd, abs_d, low_x, high_x, low_y, high_y, most};                           \
    }

#define TRUTH(b) ((b) != 0)
BYTE_LOOPS(BOOL, uint8_t, TRUTH)
BYTE_LOOPS(U8, uint8_t, )
BYTE_LOOPS(I8, int8_t, )

#define WITH_SUMS(name) [name] = {JOIN(name, _sums), JOIN(name, _spread), JOIN(name, _load)}
#define EXACT(name) [name] = {JOIN(name, _sums), 0, JOIN(name, _load)}
#define LOADED(name) [name] = {0, 0, JOIN(name, _load)}

const struct loops JOIN(graftlab_loops_, LEVEL) __attribute__((visibility("hidden"))) = {
    STEP,
    {WITH_SUMS(F32), WITH_SUMS(F64), WITH_SUMS(BF16), WITH_SUMS(F16), LOADED(E4M3FN), LOADED(E5M2), LOADED(E4M3FNUZ),
     LOADED(E5M2FNUZ), EXACT(BOOL), EXACT(U8), EXACT(I8), LOADED(U16), LOADED(I16), LOADED(U32), LOADED(I32),
     LOADED(U64), LOADED(I64)},
};
#else
/* ==== What calls the loops, compiled once ========================================================================= */

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#define BLOCK 16384      /* elements whose sums are looked at together: two blocks of float64 fit in a cache of 256 KiB */
#define PIECE 1024       /* elements that are converted at once: they stay in the first-level cache */
#define STRIPE 65536     /* elements that one thread takes at once */
#define MOST_THREADS 256 /* beyond this no memory is fast enough */
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

/* What is found of some elements. `place` is that of the first element of the block with the largest distance. */
struct part {
    int64_t pairs, nonfinite_differ, place;
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
    if (from->max_abs > into->max_abs) into->max_abs = from->max_abs, into->place = from->place;
    into->nonfinite_differ += from->nonfinite_differ;
    into->pairs += from->pairs;
}

/* ---- Some elements ------------------------------------------------------------------------------------------------ */

struct job {
    const struct loops *loops;
    enum type type_x, type_y;
    const char *x, *y;
    int64_t count;
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
        int64_t whole = count / loops->step * loops->step;
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
    int64_t whole = count / loops->step * loops->step;
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

static void measure_stripe(struct part *part, const struct job *job, int64_t stripe) {
    int64_t end = (stripe + 1) * STRIPE < job->count ? (stripe + 1) * STRIPE : job->count;
    for (int64_t at = stripe * STRIPE; at < end; at += BLOCK) {
        struct part block;
        measure_block(at == stripe * STRIPE ? part : &block, job, at, end - at < BLOCK ? end - at : BLOCK);
        if (at > stripe * STRIPE) merge(part, &block);
    }
}

/* Where in a block the distance is first so large; -1 if nowhere. */
static int64_t find_distance(const struct job *job, int64_t block, double largest) {
    int64_t end = job->count - block < BLOCK ? job->count : block + BLOCK;
    for (int64_t at = block; at < end; at += PIECE) {
        int64_t some = end - at < PIECE ? end - at : PIECE, found = 0;
        double each_x[PIECE], each_y[PIECE], distances[PIECE];
        load(job->loops, job->type_x, job->x + at * SIZES[job->type_x], some, each_x);
        load(job->loops, job->type_y, job->y + at * SIZES[job->type_y], some, each_y);
        take_distances(job, each_x, each_y, some, distances);
        for (int64_t i = 0; i < some; i++) found += distances[i] == largest;
        for (int64_t i = 0; found; i++)
            if (distances[i] == largest) return at + i;
    }
    return -1;
}

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

static void measure_all(struct part *total, const struct job *job, int threads) {
    int64_t stripes = (job->count + STRIPE - 1) / STRIPE;
    (void)threads;
    *total = (struct part){0};
    for (int64_t stripe = 0; stripe < stripes; stripe++) {
        struct part part;
        measure_stripe(&part, job, stripe);
        merge(total, &part);
    }
}

/* ---- From sums to statistics -------------------------------------------------------------------------------------- */

/* FLOAT and COUNT fields of what Python is given, under the names that it has for them. */
#define RESULTS(FLOAT, COUNT)                                                                                          \
    FLOAT(rel_l2) FLOAT(rel_diff) FLOAT(max_abs) FLOAT(mean_abs) FLOAT(cosine) FLOAT(mean_baseline)                    \
    FLOAT(std_baseline) FLOAT(min_baseline) FLOAT(max_baseline) FLOAT(mean_target) FLOAT(std_target)                   \
    FLOAT(min_target) FLOAT(max_target) COUNT(nonfinite_baseline) COUNT(nonfinite_target) COUNT(nonfinite_differ)      \
    COUNT(place)

#define FLOAT_FIELD(name) double name;
#define COUNT_FIELD(name) int64_t name;
struct results {
    RESULTS(FLOAT_FIELD, COUNT_FIELD)
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
static int measure(const struct loops *loops, const void *x, const void *y, int64_t count, int types, int threads,
                   struct results *results) {
    modes before = set_modes(USUAL_MODES);
    struct job job = {loops, types / TYPE_COUNT, types % TYPE_COUNT, x, y, count, 0, 1, 1, 1, 1};
    struct part first, second, *part = &first;
    measure_all(&first, &job, threads);
    *results = (struct results){.nonfinite_baseline = first.x.nonfinite,
                                .nonfinite_target = first.y.nonfinite,
                                .nonfinite_differ = first.nonfinite_differ,
                                .place = -1};
    if (first.pairs) {
        int exponent_x = exponent_of(magnitude(first.x.low, first.x.high));
        int exponent_y = exponent_of(magnitude(first.y.low, first.y.high));
        int exponent_d = exponent_of(first.max_abs);
        if (exponent_x || exponent_y || exponent_d) {
            job.scaled = 1, job.scale_x = ldexp(1, -exponent_x), job.scale_y = ldexp(1, -exponent_y);
            /* Large values before they are subtracted, small differences after. */
            *(exponent_d > 0 ? &job.scale_before : &job.scale_after) = ldexp(1, -exponent_d);
            measure_all(&second, &job, threads);
            part = &second;
        }
        summarize(results, part, exponent_x, exponent_y, exponent_d);
        results->min_baseline = first.x.low, results->max_baseline = first.x.high;
        results->min_target = first.y.low, results->max_target = first.y.high;
        results->place = find_distance(&job, part->place, part->max_abs);
    } else {
        double nothing = NAN;
#define NOTHING(name) results->name = nothing;
#define KEEP(name)
        RESULTS(NOTHING, KEEP)
    }
    set_modes(before);
    return first.pairs && results->place < 0;
}

#define EXPORT __attribute__((visibility("default")))
#define OF_LEVEL(level)                                                                                                \
    extern const struct loops graftlab_loops_##level __attribute__((visibility("hidden")));                            \
    EXPORT int graftlab_measure_##level(const void *x, const void *y, int64_t count, int types, int threads,           \
                                        struct results *results) {                                                     \
        return measure(&graftlab_loops_##level, x, y, count, types, threads, results);                                 \
    }

#if defined(__x86_64__)
OF_LEVEL(v2)
OF_LEVEL(v3)
OF_LEVEL(v4)
#else
OF_LEVEL(neon)
#endif

#define FLOAT_NAME(name) "d " #name "\n"
#define COUNT_NAME(name) "q " #name "\n"
#define TYPE_NAME(name, c_type) #name "\n"
/* How a line of `results` and a number of a type read, so that Python need not repeat their order. */
EXPORT const char *graftlab_results(void) { return RESULTS(FLOAT_NAME, COUNT_NAME); }
EXPORT const char *graftlab_types(void) { return TYPES(TYPE_NAME, TYPE_NAME); }
/* Which sources this was made from. */
EXPORT const char *graftlab_source(void) { return "graftlab kernel source " SOURCE; }
#endif
