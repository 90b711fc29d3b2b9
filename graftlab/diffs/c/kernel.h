/* What the loops over elements and those that call them share. */

#ifndef GRAFTLAB_KERNEL_H
#define GRAFTLAB_KERNEL_H

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

/* Of elements, for their fingerprint: sums of the values, their magnitudes, squares, third powers and the roots of their
 * magnitudes, and of the values times several factors each, which depend on their places. */
#define POWERS 5
#define FACTORS 4
struct moments {
    double low, high, powers[POWERS], projections[FACTORS];
};

#define LOOKED_AT 64

struct loops {
    struct {
        int step; /* `sums`, `spread` and `find` take multiples of so many elements */
        /* Of arrays of this type; NULL: load both first. */
        void (*sums)(const void *x, const void *y, int64_t count, struct sums *found);
        /* Of x - center, and of its squares; NULL: the sums are exact. */
        void (*spread)(const void *x, int64_t count, double center, double *total, double *squares);
        /* The first of up to LOOKED_AT elements among which |y - x| is `distance`; `count` or more if there are none. */
        int64_t (*find)(const void *x, const void *y, int64_t count, double distance);
        /* To float32 for narrow types, to float64 for wide ones. */
        void (*load)(const void *from, int64_t count, void *to);
    } of[TYPE_COUNT];
    /* Of at least one value, with factors[k * stride + i] for value i; added to `found`. Not of NaN. */
    void (*moments)(const double *x, int64_t count, const double *factors, int64_t stride, struct moments *found);
};

#define JOIN_(one, other) one##other
#define JOIN(one, other) JOIN_(one, other)

/* Call work(context, task) for each task below `tasks`, on up to so many threads, of which the caller is one. */
void graftlab_share(int threads, int64_t tasks, void (*work)(void *context, int64_t task), void *context);

#define HIDDEN __attribute__((visibility("hidden")))

#endif
