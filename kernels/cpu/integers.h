// Products in integers. Each 32 inputs are integers of 16 bits and a scale; a tile's sums over a
// group of codes are exact and are rounded to float32 once, so that the processors' ways to get
// them give the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "formats.h"

namespace {

constexpr int INTEGER_ROWS = 4;  // that one call computes, at most
constexpr int GROUPS_AHEAD = 12;  // which are asked for before they are needed

#if defined(__AVX2__)
constexpr float HIGHEST_INPUT = 127 * 256;
constexpr float LEAST_INPUT = 1e-30f;  // a group of less counts as 0

// Ask for a later group than this one. The processor's own guesses end where another thread reads
// on, and are too few where it computes for long. Into the L2 cache: less is waited for there.
template <class FORMAT>
inline void fetch_ahead(const uint8_t* group) {
    constexpr int bytes = FORMAT::scale_bytes + FORMAT::code_bytes;
#pragma GCC unroll 20
    for (int i = 0; i < bytes; i += 64)
        _mm_prefetch((const char*)group + GROUPS_AHEAD * bytes + i, _MM_HINT_T1);
}

struct Scaled {  // what 32 inputs stand for besides their digits
    float scale, sum;
};

// 32 inputs as whole numbers of at most HIGHEST_INPUT.
inline Scaled to_whole(const float* x, I* whole) {
    I most = {};  // bits of magnitudes have the order of these; NaN is above infinity
    for (int half = 0; half < 2; half++) {
        const I magnitude = (I)load(x + half * LANES) & 0x7fffffff;
        most = select(magnitude > most, magnitude, most);
    }
    const int32_t bits = highest(most);
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof bits);
    const bool is_finite = std::isfinite(magnitude);
    const float inverse = is_finite && magnitude > LEAST_INPUT ? HIGHEST_INPUT / magnitude : 0.0f;
    for (int half = 0; half < 2; half++)
        whole[half] = rounded(load(x + half * LANES) * splat(inverse));
    const float scale = is_finite ? magnitude / HIGHEST_INPUT : NAN;
    return {scale, scale * (float)sum(whole[0] + whole[1])};
}
#endif

#if defined(__AVX512F__)
const bool IN_INTEGERS = __builtin_cpu_supports("avx512vnni");

struct Inputs {  // whole = 256 bytes[0] + bytes[1]
    int8_t bytes[2][BLOCK];
    int32_t sums[2][2];  // of the bytes of each half
    Scaled scaled;
};

void to_inputs(const float* x, int count, Inputs* to) {
    for (int first = 0; first < count; first += BLOCK, to++) {
        I whole[2];
        to->scaled = to_whole(x + first, whole);
        for (int half = 0; half < 2; half++) {
            const I low = whole[half] << 24 >> 24;
            const I parts[2] = {(whole[half] - low) >> 8, low};
            for (int d = 0; d < 2; d++) {
                const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)parts[d]);
                _mm_storeu_si128((__m128i*)(to->bytes[d] + half * LANES), bytes);
                to->sums[half][d] = _mm512_reduce_add_epi32((__m512i)parts[d]);
            }
        }
    }
}

// R rows of inputs by one tile: out[r], `width` apart.
template <class FORMAT, int R>
__attribute__((target("avx512vnni"))) void integer_tile(
    const uint8_t* at, int blocks, const Inputs* x, int64_t stride, float* out, int width
) {
    using Codes = typename FORMAT::Codes;
    constexpr int PARTS = BLOCK / FORMAT::group;
    __m512 acc[R][2] = {};
    for (int block = 0; block < blocks; block++, x++) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            fetch_ahead<FORMAT>(at);
            F scale[2], offset[2] = {};
            FORMAT::scales(at, scale, offset);
            at += FORMAT::scale_bytes;
            __m512i dot[R][2][2];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int d = 0; d < 2; d++) {
                    int32_t start = 0;
                    if (Codes::is_signed) {
                        const auto& sums = x[r * stride].sums;
                        start = -128 * (PARTS == 1 ? sums[0][d] + sums[1][d] : sums[part][d]);
                    }
                    dot[r][0][d] = dot[r][1][d] = _mm512_set1_epi32(start);
                }
#pragma GCC unroll 8
            for (int quad = 0; quad < FORMAT::group / QUAD; quad++) {
                U w[2];
                Codes::bytes(at + quad * Codes::quad_bytes, w);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int d = 0; d < 2; d++) {
                        int32_t four;
                        const int i = part * FORMAT::group + quad * QUAD;
                        std::memcpy(&four, x[r * stride].bytes[d] + i, sizeof four);
                        const __m512i input = _mm512_set1_epi32(four);
                        dot[r][0][d] = _mm512_dpbusd_epi32(dot[r][0][d], (__m512i)w[0], input);
                        dot[r][1][d] = _mm512_dpbusd_epi32(dot[r][1][d], (__m512i)w[1], input);
                    }
            }
            at += FORMAT::code_bytes;
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const __m512i* d = dot[r][half];
                    const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(d[0], 8), d[1]);
                    const Scaled& scaled = x[r * stride].scaled;
                    const __m512 value =
                        _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(scaled.scale));
                    acc[r][half] = _mm512_fmadd_ps(value, (__m512)scale[half], acc[r][half]);
                    if (Codes::has_offset)
                        acc[r][half] = _mm512_fmadd_ps(
                            (__m512)offset[half], _mm512_set1_ps(scaled.sum), acc[r][half]
                        );
                }
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++)
            _mm512_storeu_ps(out + r * width + half * LANES, acc[r][half]);
}

#elif defined(__AVX2__)
constexpr bool IN_INTEGERS = true;

struct Inputs {
    int16_t words[BLOCK];  // of each four the even ones, then the odd ones
    Scaled scaled;
};

void to_inputs(const float* x, int count, Inputs* to) {
    for (int first = 0; first < count; first += BLOCK, to++) {
        I whole[2];
        to->scaled = to_whole(x + first, whole);
        for (int i = 0; i < BLOCK / WIDTH; i++) {
            typedef int16_t Narrow __attribute__((vector_size(16)));
            const Narrow v = __builtin_convertvector(whole[i / 2].part[i % 2], Narrow);
            const Narrow sorted = shuffled<0, 2, 1, 3, 4, 6, 5, 7>(v, v);
            std::memcpy(to->words + i * WIDTH, &sorted, sizeof sorted);
        }
    }
}

// R rows of inputs by one tile: out[r], `width` apart.
template <class FORMAT, int R>
void integer_tile(
    const uint8_t* at, int blocks, const Inputs* x, int64_t stride, float* out, int width
) {
    using Codes = typename FORMAT::Codes;
    using Scale = typename FORMAT::Scale;
    constexpr int PARTS = BLOCK / FORMAT::group;
    __m256 acc[R][2][2] = {};  // of eight outputs of either half
    for (int block = 0; block < blocks; block++, x++) {
        for (int part = 0; part < PARTS; part++) {
            const uint8_t *scales = at, *codes = at + FORMAT::scale_bytes;
            at = codes + FORMAT::code_bytes;
            fetch_ahead<FORMAT>(scales);
            for (int these = 0; these < 2; these++) {
                __m256i dot[R][2] = {};
                // Left alone, GCC reads more inputs ahead than there are registers.
#pragma GCC unroll 2
                for (int quad = 0; quad < FORMAT::group / QUAD; quad++) {
#pragma GCC unroll 2
                    for (int odd = 0; odd < 2; odd++) {
                        Words w[2];
                        Codes::pairs(codes + quad * Codes::quad_bytes + 32 * these, odd, w);
                        const int i = part * FORMAT::group + quad * QUAD + 2 * odd;
#pragma GCC unroll 4
                        for (int r = 0; r < R; r++) {
                            int32_t two;
                            std::memcpy(&two, x[r * stride].words + i, sizeof two);
                            const __m256i input = _mm256_set1_epi32(two);
#pragma GCC unroll 2
                            for (int half = 0; half < 2; half++) {
                                dot[r][half] = _mm256_add_epi32(
                                    dot[r][half], _mm256_madd_epi16((__m256i)w[half], input)
                                );
                                asm volatile("" : "+x"(dot[r][half]));  // a register, and in this order
                            }
                        }
                    }
                }
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const int first = half * LANES + 8 * these;
                    const __m256 scale = Scale::eight(scales, first);
                    const __m256 offset =
                        Codes::has_offset ? Scale::eight(scales, TILE + first) : __m256{};
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        const Scaled& scaled = x[r * stride].scaled;
                        const __m256 value = _mm256_mul_ps(
                            _mm256_cvtepi32_ps(dot[r][half]), _mm256_set1_ps(scaled.scale)
                        );
                        __m256& sum = acc[r][half][these];
                        sum = _mm256_fmadd_ps(value, scale, sum);
                        if (Codes::has_offset)
                            sum = _mm256_fmadd_ps(offset, _mm256_set1_ps(scaled.sum), sum);
                    }
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++)
            _mm256_storeu_ps(out + r * width + 8 * i, acc[r][i / 2][i % 2]);
}

#else
constexpr bool IN_INTEGERS = false;

struct Inputs {};

inline void to_inputs(const float*, int, Inputs*) {}
#endif

}  // namespace
