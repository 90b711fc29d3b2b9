/* Lines of rows into columns: each line a JSON array of as many values as there are columns.

   Numbers become numbers. Of everything else this finds which values are the same text, and leaves it to Python to read
   each distinct one. It takes lines as they are usually written; of others it says so, and Python reads them all. */

#include "kernel.h"

#define EXPORT __attribute__((visibility("default")))

/* How the values of a column are held, numbered as rows/parsing.py does. */
enum kind { NUMBER, INTEGER, INTEGER_OR_NULL, TEXT, TAGS };

#define NO_INTEGER INT64_MAX
#define SMALLEST_POWER (-342)
#define LARGEST_POWER 308

/* A text from one place to another. What is cut out of it differs between texts that count as one: the step in tags, which
   would make all of them distinct. Nothing is cut where both its places are the same. */
struct span {
    int32_t begin, end, cut_begin, cut_end;
};

struct lines {
    const char *text; /* whole lines: its last character is a newline */
    int64_t length, rows, columns;
    const uint8_t *kinds;
    double *numbers;   /* [columns of numbers][rows] */
    int64_t *integers; /* [columns of integers][rows] */
    int32_t *places;   /* [columns of text][rows]: which of the column's distinct texts */
    struct span *spans; /* [columns of text][rows]: where each of these is */
    int64_t *distinct; /* [columns of text]: how many there are */
    int64_t *steps;    /* [rows]: what was cut out of the tags */
    int32_t *slots;    /* [columns of text][slot_count], all zero: hash tables */
    int64_t slot_count;
    const uint64_t *powers; /* 128 bits of each power of five, the high half first */
    int64_t spaced;         /* whether a line begins with a space, which says that `json` must read its texts */
};

static int is_digit(char c) { return (unsigned char)(c - '0') < 10; }

/* Reads on to what is no digit, up to eight digits at a time: what follows them in these bytes is pushed out, and the zeros
   that come in stand before them. As in Lemire, "Quickly parsing eight digits" (2018). */
static const char *read_digits(const char *at, const char *end, uint64_t *digits) {
    static const uint64_t POWERS[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    while (end - at >= 8) {
        uint64_t eight, other;
        memcpy(&eight, at, 8);
        other = ((eight ^ 0x3030303030303030) | ((eight + 0x0606060606060606) ^ 0x3030303030303030)) & 0xF0F0F0F0F0F0F0F0;
        int count = other ? __builtin_ctzll(other) >> 3 : 8;
        if (!count) return at;
        eight = (eight & 0x0F0F0F0F0F0F0F0F) << (64 - 8 * count);
        eight = (eight * 10 + (eight >> 8)) & 0x00FF00FF00FF00FF;
        eight = (eight * 100 + (eight >> 16)) & 0x0000FFFF0000FFFF;
        *digits = *digits * POWERS[count] + (uint32_t)(eight * 10000 + (eight >> 32));
        at += count;
        if (count < 8) return at;
    }
#endif
    while (is_digit(*at)) *digits = 10 * *digits + (uint64_t)(*at++ - '0');
    return at;
}

/* The nearest float64 to digits * 10**exponent, digits not 0: Eisel and Lemire, "Number parsing at a gigabyte per second"
   (2021). Returns 0 where the result is not normal. */
static int nearest(uint64_t digits, int64_t exponent, const uint64_t *powers, uint64_t *bits) {
    if (exponent < SMALLEST_POWER || exponent > LARGEST_POWER) return 0;
    int zeros = __builtin_clzll(digits);
    digits <<= zeros;
    const uint64_t *power = powers + 2 * (exponent - SMALLEST_POWER);
    unsigned __int128 product = (unsigned __int128)digits * power[0];
    uint64_t high = product >> 64, low = (uint64_t)product;
    if ((high & 0x1FF) == 0x1FF) {
        uint64_t more = ((unsigned __int128)digits * power[1]) >> 64;
        low += more;
        high += low < more;
    }
    int upper = high >> 63, shift = upper + 64 - 52 - 3;
    uint64_t mantissa = high >> shift;
    int64_t binary = ((217706 * exponent) >> 16) + 63 + upper - zeros + 1023;
    if (binary <= 0) return 0;
    /* Halfway between two: to the even one. */
    if (low <= 1 && exponent >= -4 && exponent <= 23 && (mantissa & 3) == 1 && mantissa << shift == high) mantissa &= ~1ULL;
    mantissa = (mantissa + (mantissa & 1)) >> 1;
    if (mantissa >= 2ULL << 52) mantissa = 1ULL << 52, binary++;
    if (binary >= 0x7FF) return 0;
    *bits = (mantissa & ~(1ULL << 52)) | (uint64_t)binary << 52;
    return 1;
}

/* Each of these reads one value and returns where it ends, or NULL for what they do not take. */

static const char *read_integer(const char *at, int64_t *value) {
    int negative = *at == '-';
    at += negative;
    if (!is_digit(*at) || (*at == '0' && is_digit(at[1]))) return NULL;
    const char *first = at;
    uint64_t digits = 0;
    while (is_digit(*at)) digits = 10 * digits + (uint64_t)(*at++ - '0');
    if (at - first > 18) return NULL;
    *value = negative ? -(int64_t)digits : (int64_t)digits;
    return at;
}

static const char *read_number(const char *at, const char *end, const uint64_t *powers, double *value) {
    uint64_t digits = 0, bits = 0, sign = (uint64_t)(*at == '-') << 63;
    int64_t exponent = 0;
    at += *at == '-';
    if (!is_digit(*at)) {
        if (end - at > 8 && !memcmp(at, "Infinity", 8)) bits = 0x7FFULL << 52, at += 8;
        else if (!sign && end - at > 3 && !memcmp(at, "NaN", 3)) bits = 0xFFF8ULL << 47, at += 3;
        else if (!sign && end - at > 4 && !memcmp(at, "null", 4)) bits = 0xFFF8ULL << 47 | 1, at += 4;
        else return NULL;
        bits |= sign;
        memcpy(value, &bits, 8);
        return at;
    }
    if (*at == '0' && is_digit(at[1])) return NULL;
    const char *first = at;
    int is_integer = 1, leading = 0;
    while (is_digit(*at)) digits = 10 * digits + (uint64_t)(*at++ - '0');
    int64_t count = at - first;
    if (*at == '.') {
        is_integer = 0;
        const char *fraction = ++at;
        /* Zeros before the first digit that counts. */
        if (!digits) {
            while (*at == '0') at++;
            leading = (int)(count + at - fraction);
        }
        at = read_digits(at, end, &digits);
        if (at == fraction) return NULL;
        exponent = fraction - at;
        count += at - fraction;
    }
    if (count - leading > 19) return NULL;
    if (*at == 'e' || *at == 'E') {
        is_integer = 0;
        int minus = *++at == '-';
        at += *at == '-' || *at == '+';
        const char *power = at;
        int64_t more = 0;
        while (is_digit(*at)) more = 10 * more + (*at++ - '0');
        if (at == power || at - power > 4) return NULL;
        exponent += minus ? -more : more;
    }
    if (!digits) bits = is_integer ? 0 : sign; /* the integer -0 is 0 */
    else if (!nearest(digits, exponent, powers, &bits)) return NULL;
    else bits |= sign;
    memcpy(value, &bits, 8);
    return at;
}

/* What it contains is for Python to judge. No text has a newline, so none goes on behind its line. */
static const char *skip_text(const char *at) {
    while (*at != '"') {
        if ((unsigned char)*at < ' ') return NULL;
        if (*at == '\\') {
            at++;
            if ((unsigned char)*at < ' ') return NULL;
        }
        at++;
    }
    return at + 1;
}

static const char *skip_value(const char *at) {
    if (*at == '"') return skip_text(at + 1);
    int64_t depth = 0;
    for (const char *first = at;; at++) {
        char c = *at;
        if ((unsigned char)c < ' ') return NULL;
        if (!depth && (c == ',' || c == ']' || c == '}')) return at > first ? at : NULL;
        if (c == '"') {
            if (!depth || !(at = skip_text(at + 1))) return NULL;
            at--;
        } else if (c == '[' || c == '{') {
            if (!depth && at > first) return NULL;
            depth++;
        } else if (c == ']' || c == '}') {
            if (!--depth) return at + 1;
        }
    }
}

static uint64_t hash(const char *text, int64_t length) {
    uint64_t value = (uint64_t)length * 0x9E3779B97F4A7C15ULL, part;
    for (; length >= 8; text += 8, length -= 8) {
        memcpy(&part, text, 8);
        value = (value ^ part) * 0x9E3779B97F4A7C15ULL;
        value ^= value >> 32;
    }
    part = 0;
    memcpy(&part, text, (size_t)length);
    value = (value ^ part) * 0x9E3779B97F4A7C15ULL;
    return value ^ value >> 29;
}

static int same_text(const struct lines *lines, const struct span *one, const struct span *other) {
    int32_t head = one->cut_begin - one->begin, tail = one->end - one->cut_end;
    return other->cut_begin - other->begin == head && other->end - other->cut_end == tail &&
           (one->cut_end > one->cut_begin) == (other->cut_end > other->cut_begin) &&
           !memcmp(lines->text + one->begin, lines->text + other->begin, (size_t)head) &&
           !memcmp(lines->text + one->cut_end, lines->text + other->cut_end, (size_t)tail);
}

/* The place of a text among the distinct ones of its column. */
static int32_t place_of(const struct lines *lines, int64_t column, struct span span) {
    int32_t *slots = lines->slots + column * lines->slot_count;
    struct span *spans = lines->spans + column * lines->rows;
    uint64_t key = hash(lines->text + span.begin, span.cut_begin - span.begin);
    key = key * 31 + hash(lines->text + span.cut_end, span.end - span.cut_end);
    int64_t mask = lines->slot_count - 1;
    for (int64_t slot = (int64_t)key & mask;; slot = (slot + 1) & mask) {
        int32_t place = slots[slot] - 1;
        if (place < 0) {
            place = (int32_t)lines->distinct[column]++;
            slots[slot] = place + 1;
            spans[place] = span;
            return place;
        }
        if (same_text(lines, spans + place, &span)) return place;
    }
}

static const char *read_text(const struct lines *lines, int64_t column, int64_t row, const char *at, const char *end) {
    int32_t *places = lines->places + column * lines->rows;
    if (row) {
        /* Often it is what the row before has. */
        const struct span *span = lines->spans + column * lines->rows + places[row - 1];
        int64_t length = span->end - span->begin;
        if (end - at > length && !memcmp(lines->text + span->begin, at, (size_t)length) &&
            (at[length] == ',' || at[length] == ']')) {
            places[row] = places[row - 1];
            return at + length;
        }
    }
    const char *after = skip_value(at);
    if (!after) return NULL;
    int32_t begin = (int32_t)(at - lines->text), stop = (int32_t)(after - lines->text);
    places[row] = place_of(lines, column, (struct span){begin, stop, stop, stop});
    return after;
}

/* An object. The step at its top level is cut out, if it is an integer. */
static const char *read_tags(const struct lines *lines, int64_t column, int64_t row, const char *at) {
    struct span span = {.begin = (int32_t)(at - lines->text)};
    lines->steps[row] = NO_INTEGER;
    if (*at++ != '{') return NULL;
    if (*at == '}') at++;
    else
        for (;;) {
            const char *name = at, *value;
            if (*at != '"' || !(at = skip_text(at + 1)) || *at++ != ':') return NULL;
            value = at;
            if (!(at = skip_value(at)) || (*at != ',' && *at != '}')) return NULL;
            if (value - name == 7 && !memcmp(name, "\"step\":", 7)) {
                if (lines->steps[row] != NO_INTEGER) return NULL;
                if (read_integer(value, &lines->steps[row]) == at) {
                    span.cut_begin = (int32_t)(value - lines->text);
                    span.cut_end = (int32_t)(at - lines->text);
                } else lines->steps[row] = NO_INTEGER;
            }
            if (*at++ == '}') break;
        }
    span.end = (int32_t)(at - lines->text);
    if (lines->steps[row] == NO_INTEGER) span.cut_begin = span.cut_end = span.end;
    lines->places[column * lines->rows + row] = place_of(lines, column, span);
    return at;
}

/* Returns 0, or 1 where there is a line that it does not take; then what it has written says nothing. */
EXPORT int graftlab_read_lines(struct lines *lines) {
    const char *at = lines->text, *end = at + lines->length;
    for (int64_t row = 0; row < lines->rows; row++) {
        int64_t number = 0, integer = 0, text = 0;
        if (*at == ' ') lines->spaced = 1, at++;
        if (*at++ != '[') return 1;
        for (int64_t column = 0; column < lines->columns; column++) {
            if (column && *at++ != ',') return 1;
            int64_t *into;
            switch ((enum kind)lines->kinds[column]) {
            case NUMBER:
                at = read_number(at, end, lines->powers, &lines->numbers[number++ * lines->rows + row]);
                break;
            case INTEGER:
            case INTEGER_OR_NULL:
                into = &lines->integers[integer++ * lines->rows + row];
                if (lines->kinds[column] == INTEGER_OR_NULL && end - at > 4 && !memcmp(at, "null", 4)) {
                    *into = NO_INTEGER;
                    at += 4;
                } else at = read_integer(at, into);
                break;
            case TEXT: at = read_text(lines, text++, row, at, end); break;
            case TAGS: at = read_tags(lines, text++, row, at); break;
            }
            if (!at) return 1;
        }
        if (*at++ != ']' || *at++ != '\n') return 1;
    }
    return at != end;
}

/* The CRC-32 of the first `count` lines, each without its newline, eight bytes at a time: Kounavis and Berry, "A systematic
   approach to building high performance software-based CRC generators" (2005). Returns how many lines there are, if fewer. */

static uint32_t crc_tables[8][256];

__attribute__((constructor)) static void make_crc_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xEDB88320 : 0);
        crc_tables[0][byte] = sum;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int table = 1; table < 8; table++) {
            uint32_t sum = crc_tables[table - 1][byte];
            crc_tables[table][byte] = sum >> 8 ^ crc_tables[0][sum & 255];
        }
}

EXPORT int64_t graftlab_sum_lines(const uint8_t *text, int64_t length, int64_t count, uint32_t *sums) {
    const uint8_t *end = text + length;
    int64_t line = 0;
    for (; line < count && text < end; line++) {
        const uint8_t *stop = memchr(text, '\n', (size_t)(end - text));
        if (!stop) break;
        uint32_t sum = 0xFFFFFFFF;
        for (; stop - text >= 8; text += 8) {
            uint32_t low = sum ^ ((uint32_t)text[0] | (uint32_t)text[1] << 8 | (uint32_t)text[2] << 16 | (uint32_t)text[3] << 24);
            sum = crc_tables[7][low & 255] ^ crc_tables[6][low >> 8 & 255] ^ crc_tables[5][low >> 16 & 255] ^
                  crc_tables[4][low >> 24] ^ crc_tables[3][text[4]] ^ crc_tables[2][text[5]] ^ crc_tables[1][text[6]] ^
                  crc_tables[0][text[7]];
        }
        for (; text < stop; text++) sum = sum >> 8 ^ crc_tables[0][(sum ^ *text) & 255];
        sums[line] = ~sum;
        text = stop + 1;
    }
    return line;
}
