/* crc32c: by tables, by the CRC32 instruction, or by carry-less products of 64 bytes.
 *
 * Everything is reflected: the lowest bit of the first byte is the highest power of x. P is the
 * polynomial, and a checksum is M x^32 mod P for the message M (its first 32 bits and the result
 * inverted). A part that lies n bits before the end may be taken mod P after it was multiplied with
 * x^n mod P; that is what both ways below do.
 */
#include "crc32c.h"

#include <string.h>
#if defined(__SSE4_2__)
#include <immintrin.h>
#endif

#include "op.h"

enum { BY_TABLE, BY_INSTRUCTION, BY_PRODUCT };

/* value x^n mod P. */
static uint32_t times_x(uint32_t value, int64_t n) {
    while (n-- > 0) value = value >> 1 ^ (value & 1 ? 0x82f63b78u : 0);
    return value;
}

static uint32_t table[8][256]; /* of a byte that is followed by 0 ... 7 others */

static uint32_t by_table(uint32_t crc, const unsigned char *p, size_t size) {
    for (; size >= 8; size -= 8, p += 8) {
        crc ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        crc = table[7][crc & 255] ^ table[6][crc >> 8 & 255] ^ table[5][crc >> 16 & 255] ^
              table[4][crc >> 24] ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^
              table[0][p[7]];
    }
    while (size-- > 0) crc = crc >> 8 ^ table[0][(crc ^ *p++) & 255];
    return crc;
}

#if defined(__SSE4_2__)
/* The instruction takes 8 bytes a cycle but has its result after three: three parts at a time. */
#define PART 1024
#define ONE 0x80000000u
static uint32_t one_part_on, two_parts_on;

static inline uint64_t word_at(const unsigned char *p) {
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

static uint32_t one_by_one(uint32_t crc, const unsigned char *p, size_t size) {
    for (; size >= 8; size -= 8, p += 8) crc = (uint32_t)_mm_crc32_u64(crc, word_at(p));
    while (size-- > 0) crc = _mm_crc32_u8(crc, *p++);
    return crc;
}

/* crc a x^33 mod P. */
__attribute__((target("pclmul"))) static inline uint32_t product(uint32_t crc, uint32_t a) {
    const __m128i wide = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)crc),
                                              _mm_cvtsi32_si128((int)a), 0);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(wide));
}

__attribute__((target("pclmul"))) static uint32_t
by_instruction(uint32_t crc, const unsigned char *p, size_t size) {
    for (; size >= 3 * PART; size -= 3 * PART, p += 3 * PART) {
        uint64_t a = crc, b = 0, c = 0;
        for (int i = 0; i < PART; i += 8) {
            a = _mm_crc32_u64(a, word_at(p + i));
            b = _mm_crc32_u64(b, word_at(p + PART + i));
            c = _mm_crc32_u64(c, word_at(p + 2 * PART + i));
        }
        crc = product((uint32_t)a, two_parts_on) ^ product((uint32_t)b, one_part_on) ^ (uint32_t)c;
    }
    return one_by_one(crc, p, size);
}
#endif

#if defined(__AVX512F__)
static uint64_t on_2048[2], on_512[2], on_128[2]; /* bits; for the lower and the higher half */

/* Both halves of each 16 bytes, multiplied and added: they have moved on by as much as `by` says. */
__attribute__((target("avx512f,vpclmulqdq"))) static inline __m512i move_on(__m512i x, __m512i by,
                                                                          __m512i plus) {
    const __m512i low = _mm512_clmulepi64_epi128(x, by, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(x, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, plus, 0x96);
}

enum { CHECK, COPY, LAND };

/* With COPY or LAND also copies to `to`, and fetches what lies at `ahead` meanwhile. */
__attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul"), always_inline)) static inline uint32_t
fold(uint32_t crc, const unsigned char *p, size_t size, int what, char *to, const char *ahead) {
    const __m512i by = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)on_2048));
    __m512i x[4] = {_mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc))};
    for (size_t at = 0; at + 256 <= size; at += 256)
        for (int i = 0; i < 4; i++) {
            const __m512i next = _mm512_loadu_si512(p + at + 64 * i);
            if (what == COPY) _mm512_storeu_si512(to + at + 64 * i, next);
            if (what == LAND) _mm512_stream_si512((void *)(to + at + 64 * i), next);
            if (what != CHECK) __builtin_prefetch(ahead + at + 64 * i, 0, 2);
            x[i] = at > 0 ? move_on(x[i], by, next) : _mm512_xor_si512(x[i], next);
        }
    const __m512i by_512 = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)on_512));
    for (int i = 0; i < 3; i++) x[i + 1] = move_on(x[i], by_512, x[i + 1]);
    const __m128i by_128 = _mm_loadu_si128((const __m128i *)on_128);
    __m128i lanes[4], y;
    _mm512_storeu_si512(lanes, x[3]);
    y = lanes[0];
    for (int i = 1; i < 4; i++)
        y = _mm_ternarylogic_epi64(_mm_clmulepi64_si128(y, by_128, 0x00),
                                   _mm_clmulepi64_si128(y, by_128, 0x11), lanes[i], 0x96);
    crc = (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(y));
    crc = (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(y, 1));
    const size_t done = size / 256 * 256;
    if (what == CHECK) return one_by_one(crc, p + done, size - done);
    memcpy(to + done, p + done, size - done);
    return one_by_one(crc, (const unsigned char *)to + done, size - done);
}

#define LEAST 512 /* bytes; fewer are not worth it */

__attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul"))) static uint32_t
by_product(uint32_t crc, const unsigned char *p, size_t size) {
    return size < LEAST ? one_by_one(crc, p, size) : fold(crc, p, size, CHECK, NULL, NULL);
}

__attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul"))) static uint32_t
copy_by_product(uint32_t crc, const unsigned char *p, size_t size, char *to, const char *ahead) {
    return fold(crc, p, size, COPY, to, ahead);
}

__attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul"))) static uint32_t
land_by_product(uint32_t crc, const unsigned char *p, size_t size, char *to, const char *ahead) {
    return fold(crc, p, size, LAND, to, ahead);
}

static void find_halves(uint64_t halves[2], int num_bits) {
    /* The product of two reflected halves, one of them 32 bits wide, has 33 too many. */
    halves[0] = times_x(ONE, num_bits + 64 - 33);
    halves[1] = times_x(ONE, num_bits - 33);
}
#endif

static int best_way;

__attribute__((constructor)) static void prepare(void) {
    for (int byte = 0; byte < 256; byte++) table[0][byte] = times_x((uint32_t)byte, 8);
    for (int i = 1; i < 8; i++)
        for (int byte = 0; byte < 256; byte++)
            table[i][byte] = table[i - 1][byte] >> 8 ^ table[0][table[i - 1][byte] & 255];
#if defined(__SSE4_2__)
    one_part_on = times_x(ONE, 8 * PART - 33);
    two_parts_on = times_x(ONE, 16 * PART - 33);
    if (__builtin_cpu_supports("pclmul")) best_way = BY_INSTRUCTION;
#endif
#if defined(__AVX512F__)
    find_halves(on_2048, 2048);
    find_halves(on_512, 512);
    find_halves(on_128, 128);
    if (best_way == BY_INSTRUCTION && __builtin_cpu_supports("vpclmulqdq")) best_way = BY_PRODUCT;
#endif
}

static uint32_t extend(int way, uint32_t seed, const void *data, size_t size) {
#if defined(__AVX512F__)
    if (way == BY_PRODUCT) return ~by_product(~seed, data, size);
#endif
#if defined(__SSE4_2__)
    if (way == BY_INSTRUCTION) return ~by_instruction(~seed, data, size);
#endif
    (void)way;
    return ~by_table(~seed, data, size);
}

uint32_t lg_crc32c_extend(uint32_t seed, const void *data, size_t size) {
    return extend(best_way, seed, data, size);
}

uint32_t lg_crc32c_copy(uint32_t seed, char *to, const char *from, size_t size, const char *ahead) {
#if defined(__AVX512F__)
    if (best_way == BY_PRODUCT && size >= LEAST)
        return ~copy_by_product(~seed, (const unsigned char *)from, size, to, ahead);
#endif
    for (size_t i = 0; i + 64 <= size; i += 64) {
        __builtin_prefetch(ahead + i, 0, 2);
        memcpy(to + i, from + i, 64);
    }
    memcpy(to + size / 64 * 64, from + size / 64 * 64, size % 64);
    return extend(best_way, seed, to, size);
}

uint32_t lg_crc32c_land(uint32_t seed, char *to, const char *from, size_t size, const char *ahead) {
#if defined(__AVX512F__)
    if (best_way == BY_PRODUCT && size >= LEAST && (uintptr_t)to % 64 == 0)
        return ~land_by_product(~seed, (const unsigned char *)from, size, to, ahead);
#endif
    return lg_crc32c_copy(seed, to, from, size, ahead);
}

/* The best way has the highest number; the lower ones can be asked for too, by tests. */
LG_API int lg_crc32c_best_way(void) { return best_way; }

LG_API uint32_t lg_crc32c(uint32_t seed, const void *data, size_t size, int way) {
    return extend(way < best_way ? way : best_way, seed, data, size);
}
