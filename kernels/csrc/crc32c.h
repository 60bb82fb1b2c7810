/* crc32c: CRC-32C (Castagnoli) of memory. */
#ifndef LEGATO_CRC32C_H
#define LEGATO_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Of `size` bytes, behind those that `seed` is the checksum of (0: none). */
uint32_t lg_crc32c_extend(uint32_t seed, const void *data, size_t size);

/* The same, and `size` bytes are copied; as much at `ahead` is fetched meanwhile. */
uint32_t lg_crc32c_copy(uint32_t seed, char *to, const char *from, size_t size, const char *ahead);

/* The same, for bytes that nobody reads soon: past the caches where that is possible, which saves
 * reading what is overwritten (_mm_sfence makes them seen). What is copied are the bytes that were
 * checked, also where others write `from` meanwhile. */
uint32_t lg_crc32c_land(uint32_t seed, char *to, const char *from, size_t size, const char *ahead);

#endif
