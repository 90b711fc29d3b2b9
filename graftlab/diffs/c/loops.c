/* The loops over elements. This file is compiled once for each level of the processor's instructions (-DLEVEL=v4).
 *
 * Not for -ffast-math: the order of additions is a promise here, and NaN and infinity are values. */

#include "kernel.h"

/* ==== The loops over elements, for one level ======================================================================== */

/* F and D are the registers' vectors of floats and doubles; an F makes HALVES of D, and W has as many bytes as F. B is
 * the largest vector of bytes. Several accumulators of one sum (SETS) hide the time that an addition takes, where there
 * are registers for them. */
#if defined(__aarch64__)
#include <arm_neon.h>
typedef float32x4_t F;
typedef float64x2_t D;
typedef int16x8_t W;
typedef uint8x16_t B;
#define SETS 2
#define MIN_F vminq_f32
#define MAX_F vmaxq_f32
#define MIN_D vminq_f64
#define MAX_D vmaxq_f64
#define SQRT_D vsqrtq_f64
#define MAX_SIGNED_W vmaxq_s16
#define MAX_UNSIGNED_W(one, other) ((W)vmaxq_u16((uint16x8_t)(one), (uint16x8_t)(other)))
#define MIN_B vminq_u8
#define MAX_B vmaxq_u8
#define WIDEN(f, half) ((half) ? vcvt_high_f64_f32(f) : vcvt_f64_f32(vget_low_f32(f)))
#define ADD_BYTES(sum, bytes) ((B)vpadalq_u16((uint32x4_t)(sum), vpaddlq_u8(bytes)))
#define ADD_SQUARES(sum, words)                                                                                        \
    ((B)vmlal_high_s16(vmlal_s16((int32x4_t)(sum), vget_low_s16(words), vget_low_s16(words)), words, words))
#define ANY "w"
#else
#include <immintrin.h>
#if defined(__AVX512F__)
typedef __m256 F;
typedef __m512d D;
typedef __m512i B;
#define ON_F(operation) _mm256_##operation
#define ON_D(operation) _mm512_##operation
#define WIDEN(f, half) _mm512_cvtps_pd(f)
#define ANY "v"
#elif defined(__AVX2__)
typedef __m256 F;
typedef __m256d D;
typedef __m256i B;
#define ON_F(operation) _mm256_##operation
#define ON_D(operation) _mm256_##operation
#define WIDEN(f, half) _mm256_cvtps_pd((half) ? _mm256_extractf128_ps(f, 1) : _mm256_castps256_ps128(f))
#define ANY "x"
#else
typedef __m128 F;
typedef __m128d D;
typedef __m128i B;
#define ON_F(operation) _mm_##operation
#define ON_D(operation) _mm_##operation
#define WIDEN(f, half) _mm_cvtps_pd((half) ? _mm_movehl_ps(f, f) : f)
#define ANY "x"
#endif
typedef long long INTEGERS __attribute__((vector_size(sizeof(F)))); /* what instructions on integers take */
typedef int16_t W __attribute__((vector_size(sizeof(F))));
#define SETS 1
#define MIN_F ON_F(min_ps)
#define MAX_F ON_F(max_ps)
#define MIN_D ON_D(min_pd)
#define MAX_D ON_D(max_pd)
#define SQRT_D ON_D(sqrt_pd)
#define MIN_B ON_D(min_epu8)
#define MAX_B ON_D(max_epu8)
#define MAX_SIGNED_W(one, other) ((W)ON_F(max_epi16)((INTEGERS)(one), (INTEGERS)(other)))
#define MAX_UNSIGNED_W(one, other) ((W)ON_F(max_epu16)((INTEGERS)(one), (INTEGERS)(other)))
#define ADD_BYTES(sum, bytes) ON_D(add_epi64)(sum, ON_D(sad_epu8)(bytes, (B){0}))
#define ADD_SQUARES(sum, words) ON_D(add_epi32)(sum, ON_D(madd_epi16)((B)(words), (B)(words)))
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
typedef W FREE_W __attribute__((aligned(1), may_alias));
typedef B FREE_B __attribute__((aligned(1), may_alias));
typedef uint8_t BYTES __attribute__((vector_size(sizeof(B))));
typedef int16_t SIGNED __attribute__((vector_size(sizeof(B))));
typedef uint16_t UNSIGNED __attribute__((vector_size(sizeof(B))));

#define INLINE static inline __attribute__((always_inline))
#define EQUAL(one, other) ((BITS_D)((one) == (other)))
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

/* The least and greatest of vectors of values. */
#define START_VALUES(low, high, from, first) ((low) = (high) = (first))
#define FOLLOW_VALUES(low, high, from, first, second, MIN, MAX)                                                        \
    ((low) = MIN(MIN(first, second), low), (high) = MAX(MAX(first, second), high))
#define FINISH_VALUES(name, found_low, found_high, low, high, vector, element, from, count)                            \
    ENDS(found_low, found_high, low, high, vector, element)

/* So many bytes ahead, half a page, memory is asked for: 5 % of the time of large float16 tensors. */
#define AHEAD 2048
/* The same of floats of 16 bits, from the bits: integer instructions take twice as many elements. Among the bits as
 * integers without sign, those of the farthest negative number are the largest, and among those with sign, those of
 * the largest positive one. Where all have one sign, what is nearest to zero is looked for afterwards. */
#define START_BITS(low, high, from, first) ((low) = (high) = *(const FREE_W *)(from))
#define FOLLOW_BITS(low, high, from, first, second, MIN, MAX)                                                          \
    (__builtin_prefetch((const char *)(from) + AHEAD), (low) = MAX_UNSIGNED_W(*(const FREE_W *)(from), low),           \
     (high) = MAX_SIGNED_W(*(const FREE_W *)(from), high))
#define FINISH_BITS(name, found_low, found_high, low, high, vector, element, from, count)                              \
    do {                                                                                                               \
        uint16_t ends_[2] = {0, 0};                                                                                    \
        ends_of_bits(low, high, from, count, ends_);                                                                   \
        float values_[2];                                                                                              \
        JOIN(name, _load)(ends_, 2, values_);                                                                          \
        (found_low) = values_[0], (found_high) = values_[1];                                                           \
    } while (0)

static void ends_of_bits(W low, W high, const uint16_t *from, int64_t count, uint16_t ends[2]) {
    uint16_t lows[sizeof(W) / 2], least = 0, nearest = 0xffff;
    int16_t highs[sizeof(W) / 2], greatest = INT16_MIN;
    memcpy(lows, &low, sizeof lows), memcpy(highs, &high, sizeof highs);
    for (unsigned i = 0; i < sizeof(W) / 2; i++) {
        least = lows[i] > least ? lows[i] : least, greatest = highs[i] > greatest ? highs[i] : greatest;
    }
    int some_negative = least >= 0x8000, some_positive = greatest >= 0;
    if (!(some_negative && some_positive)) {
        for (int64_t i = 0; i < count; i++) nearest = from[i] < nearest ? from[i] : nearest;
    }
    ends[0] = some_negative ? least : nearest, ends[1] = some_positive ? (uint16_t)greatest : nearest;
}

#define ADD(set, a, b)                                                                                                 \
    do {                                                                                                               \
        D d_ = (b) - (a), m_ = ABS(d_);                                                                                \
        x[set] += TIMES_ONE(a, one), y[set] += TIMES_ONE(b, one);                                                      \
        xx[set] += (a) * (a), yy[set] += (b) * (b), dd[set] += d_ * d_;                                                \
        abs_d[set] += TIMES_ONE(m_, one), most = MAX_D(m_, most);                                                      \
    } while (0)

/* `narrow` is what two loads give: vectors of floats, of which each makes `halves` of doubles, or doubles already. */
#define FLOAT_LOOPS(name, c_type, vector, element, halves, WIDER, MIN, MAX, OF, ends)                                  \
    static void JOIN(name, _sums)(const void *from_x, const void *from_y, int64_t count, struct sums *found) {         \
        const c_type *each_x = from_x, *each_y = from_y;                                                               \
        const int64_t step = 2 * sizeof(vector) / sizeof(element);                                                     \
        D totals[6][SETS] = {{{0}}}, most = {0};                                                                       \
        vector x0, x1, y0, y1;                                                                                         \
        ends low_x, high_x, low_y, high_y;                                                                             \
        ONE(one);                                                                                                      \
        JOIN(name, _two)(&x0, &x1, each_x), JOIN(name, _two)(&y0, &y1, each_y);                                        \
        JOIN(START_, OF)(low_x, high_x, each_x, x0), JOIN(START_, OF)(low_y, high_y, each_y, y0);                      \
        for (int64_t at = 0; at < count;) {                                                                            \
            int64_t end = count - at < RUN ? count : at + RUN;                                                         \
            D x[SETS] = {{0}}, y[SETS] = {{0}}, xx[SETS] = {{0}}, yy[SETS] = {{0}}, dd[SETS] = {{0}};                  \
            D abs_d[SETS] = {{0}};                                                                                     \
            for (; at < end; at += step) {                                                                             \
                JOIN(name, _two)(&x0, &x1, each_x + at), JOIN(name, _two)(&y0, &y1, each_y + at);                      \
                JOIN(FOLLOW_, OF)(low_x, high_x, each_x + at, x0, x1, MIN, MAX);                                       \
                JOIN(FOLLOW_, OF)(low_y, high_y, each_y + at, y0, y1, MIN, MAX);                                       \
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
        JOIN(FINISH_, OF)(name, found->low_x, found->high_x, low_x, high_x, vector, element, each_x, count);           \
        JOIN(FINISH_, OF)(name, found->low_y, found->high_y, low_y, high_y, vector, element, each_y, count);           \
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
    }                                                                                                                  \
    static int64_t JOIN(name, _find)(const void *from_x, const void *from_y, int64_t count, double distance) {         \
        const c_type *each_x = from_x, *each_y = from_y;                                                               \
        const int64_t step = 2 * sizeof(vector) / sizeof(element);                                                     \
        D looked_for = (D){0} + distance;                                                                              \
        for (int64_t at = 0; at < count; at += LOOKED_AT) {                                                            \
            int64_t end = count - at < LOOKED_AT ? count : at + LOOKED_AT;                                             \
            BITS_D hits = {0};                                                                                         \
            for (int64_t i = at; i < end; i += step) {                                                                 \
                vector x0, x1, y0, y1;                                                                                 \
                JOIN(name, _two)(&x0, &x1, each_x + i), JOIN(name, _two)(&y0, &y1, each_y + i);                        \
                hits |= EQUAL(ABS(WIDER(y0, 0) - WIDER(x0, 0)), looked_for);                                           \
                hits |= EQUAL(ABS(WIDER(y1, 0) - WIDER(x1, 0)), looked_for);                                           \
                if (halves == 2) {                                                                                     \
                    hits |= EQUAL(ABS(WIDER(y0, 1) - WIDER(x0, 1)), looked_for);                                       \
                    hits |= EQUAL(ABS(WIDER(y1, 1) - WIDER(x1, 1)), looked_for);                                       \
                }                                                                                                      \
            }                                                                                                          \
            uint64_t lanes[DOUBLES], any = 0;                                                                          \
            memcpy(lanes, &hits, sizeof lanes);                                                                        \
            for (int i = 0; i < DOUBLES; i++) any |= lanes[i];                                                         \
            if (any) return at;                                                                                        \
        }                                                                                                              \
        return count;                                                                                                  \
    }

#define AS_IT_IS(vector, half) (vector)
FLOAT_LOOPS(F32, float, F, float, HALVES, WIDEN, MIN_F, MAX_F, VALUES, F)
FLOAT_LOOPS(BF16, uint16_t, F, float, HALVES, WIDEN, MIN_F, MAX_F, BITS, W)
FLOAT_LOOPS(F16, uint16_t, F, float, HALVES, WIDEN, MIN_F, MAX_F, BITS, W)
FLOAT_LOOPS(F64, double, D, double, 1, AS_IT_IS, MIN_D, MAX_D, VALUES, D)

/* Lanes of 64 bits can be read as two of 32, because no sum of a block is larger. */
static int64_t lanes_of(B sums) {
    uint32_t lanes[sizeof(B) / 4];
    int64_t total = 0;
    memcpy(lanes, &sums, sizeof lanes);
    for (unsigned i = 0; i < sizeof(B) / 4; i++) total += lanes[i];
    return total;
}

static void ends_of_bytes(B low, B high, double offset, double *found_low, double *found_high) {
    uint8_t lows[sizeof(B)], highs[sizeof(B)], least = 255, greatest = 0;
    memcpy(lows, &low, sizeof lows), memcpy(highs, &high, sizeof highs);
    for (unsigned i = 0; i < sizeof(B); i++) {
        least = lows[i] < least ? lows[i] : least, greatest = highs[i] > greatest ? highs[i] : greatest;
    }
    *found_low = least - offset, *found_high = greatest - offset;
}

/* Integers of one byte: all sums are exact in 32 bits for a block of up to 2**15 elements. FLIP makes the bytes
 * unsigned and keeps their order and distances, because the instructions for bytes take them without sign. `pairs` are
 * the words that two bytes make: of the even bytes and of the odd ones, both as 16 bits, for squares. */
#define BYTE_LOOPS(name, c_type, pairs, VALUE, VALUES, FLIP, offset)                                                   \
    static void JOIN(name, _sums)(const void *from_x, const void *from_y, int64_t count, struct sums *found) {         \
        const c_type *each_x = from_x, *each_y = from_y;                                                               \
        B x = {0}, y = {0}, xx = {0}, yy = {0}, dd = {0}, abs_d = {0}, most = {0};                                     \
        B high_x = {0}, high_y = {0}, low_x = ~high_x, low_y = ~high_y;                                                \
        for (int64_t at = 0; at < count; at += (int64_t)sizeof(B)) {                                                   \
            B signed_x = VALUES(*(const FREE_B *)(each_x + at)), signed_y = VALUES(*(const FREE_B *)(each_y + at));    \
            B a = FLIP(signed_x), b = FLIP(signed_y), d = (B)((BYTES)MAX_B(a, b) - (BYTES)MIN_B(a, b));                \
            low_x = MIN_B(a, low_x), high_x = MAX_B(a, high_x);                                                        \
            low_y = MIN_B(b, low_y), high_y = MAX_B(b, high_y), most = MAX_B(d, most);                                 \
            x = ADD_BYTES(x, a), y = ADD_BYTES(y, b), abs_d = ADD_BYTES(abs_d, d);                                     \
            SIGNED even_x = (SIGNED)((pairs)signed_x << 8 >> 8), odd_x = (SIGNED)((pairs)signed_x >> 8);               \
            SIGNED even_y = (SIGNED)((pairs)signed_y << 8 >> 8), odd_y = (SIGNED)((pairs)signed_y >> 8);               \
            xx = ADD_SQUARES(xx, even_x), xx = ADD_SQUARES(xx, odd_x);                                                 \
            yy = ADD_SQUARES(yy, even_y), yy = ADD_SQUARES(yy, odd_y);                                                 \
            dd = ADD_SQUARES(dd, even_x - even_y), dd = ADD_SQUARES(dd, odd_x - odd_y);                                \
        }                                                                                                              \
        double shift = (double)(offset) * count, unused;                                                               \
        *found = (struct sums){.x = lanes_of(x) - shift, .y = lanes_of(y) - shift, .abs_d = lanes_of(abs_d)};          \
        found->xx = lanes_of(xx), found->yy = lanes_of(yy), found->dd = lanes_of(dd);                                  \
        ends_of_bytes(low_x, high_x, offset, &found->low_x, &found->high_x);                                           \
        ends_of_bytes(low_y, high_y, offset, &found->low_y, &found->high_y);                                           \
        ends_of_bytes(most, most, 0, &unused, &found->max_abs);                                                        \
    }                                                                                                                  \
    static int64_t JOIN(name, _find)(const void *from_x, const void *from_y, int64_t count, double distance) {         \
        const c_type *each_x = from_x, *each_y = from_y;                                                               \
        int16_t looked_for = (int16_t)distance;                                                                        \
        for (int64_t at = 0; at < count; at += LOOKED_AT) {                                                            \
            int64_t end = count - at < LOOKED_AT ? count : at + LOOKED_AT;                                             \
            int16_t any = 0;                                                                                           \
            for (int64_t i = at; i < end; i++) {                                                                       \
                int16_t d = (int16_t)(VALUE(each_y[i]) - VALUE(each_x[i]));                                            \
                any |= (int16_t)(d < 0 ? -d : d) == looked_for;                                                        \
            }                                                                                                          \
            if (any) return at;                                                                                        \
        }                                                                                                              \
        return count;                                                                                                  \
    }

#define TRUTH(b) ((b) != 0)
#define TRUTHS(v) MIN_B(v, (B)((BYTES){0} + 1))
#define FLIPPED(v) ((B)((BYTES)(v) ^ 0x80))
BYTE_LOOPS(BOOL, uint8_t, UNSIGNED, TRUTH, TRUTHS, , 0)
BYTE_LOOPS(U8, uint8_t, UNSIGNED, , , , 0)
BYTE_LOOPS(I8, int8_t, SIGNED, , , FLIPPED, 128)

static double lanes_total(D sums) {
    double lanes[DOUBLES], total = 0;
    memcpy(lanes, &sums, sizeof lanes);
    for (int i = 0; i < DOUBLES; i++) total += lanes[i];
    return total;
}

static void moments(const double *x, int64_t count, const double *factors, int64_t stride, struct moments *found) {
    D powers[POWERS] = {{0}}, projections[FACTORS] = {{0}}, low = (D){0} + x[0], high = low;
    for (int64_t at = 0; at < count; at += DOUBLES) {
        int64_t some = count - at < DOUBLES ? count - at : DOUBLES;
        D v, of_place[FACTORS];
        if (some == DOUBLES) {
            v = *(const FREE_D *)(x + at);
            for (int k = 0; k < FACTORS; k++) of_place[k] = *(const FREE_D *)(factors + k * stride + at);
            low = MIN_D(v, low), high = MAX_D(v, high);
        } else {
            /* Zeros change no sum, but may be an extreme. */
            v = (D){0};
            for (int k = 0; k < FACTORS; k++) of_place[k] = v;
            D ends = (D){0} + x[0];
            memcpy(&v, x + at, some * sizeof(double)), memcpy(&ends, x + at, some * sizeof(double));
            for (int k = 0; k < FACTORS; k++) memcpy(&of_place[k], factors + k * stride + at, some * sizeof(double));
            low = MIN_D(ends, low), high = MAX_D(ends, high);
        }
        D magnitude = ABS(v), square = v * v;
        powers[0] += v, powers[1] += magnitude, powers[2] += square;
        powers[3] += square * v, powers[4] += SQRT_D(magnitude);
        for (int k = 0; k < FACTORS; k++) projections[k] += of_place[k] * v;
    }
    double lows[DOUBLES], highs[DOUBLES];
    memcpy(lows, &low, sizeof lows), memcpy(highs, &high, sizeof highs);
    for (int i = 0; i < DOUBLES; i++) {
        found->low = lows[i] < found->low ? lows[i] : found->low;
        found->high = highs[i] > found->high ? highs[i] : found->high;
    }
    for (int k = 0; k < POWERS; k++) found->powers[k] += lanes_total(powers[k]);
    for (int k = 0; k < FACTORS; k++) found->projections[k] += lanes_total(projections[k]);
}

#define WITH_SUMS(name) [name] = {STEP, JOIN(name, _sums), JOIN(name, _spread), JOIN(name, _find), JOIN(name, _load)}
#define EXACT(name) [name] = {sizeof(B), JOIN(name, _sums), 0, JOIN(name, _find), JOIN(name, _load)}
#define LOADED(name) [name] = {1, 0, 0, 0, JOIN(name, _load)}

const struct loops JOIN(graftlab_loops_, LEVEL) __attribute__((visibility("hidden"))) = {
    {WITH_SUMS(F32), WITH_SUMS(F64), WITH_SUMS(BF16), WITH_SUMS(F16), LOADED(E4M3FN), LOADED(E5M2), LOADED(E4M3FNUZ),
     LOADED(E5M2FNUZ), EXACT(BOOL), EXACT(U8), EXACT(I8), LOADED(U16), LOADED(I16), LOADED(U32), LOADED(I32),
     LOADED(U64), LOADED(I64)},
    moments,
};
