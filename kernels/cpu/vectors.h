// Vectors of 16 numbers: loads from several widths, and the exponential.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));

inline F splat(float x) { return x - F{}; }
inline F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }

inline U words(const uint8_t* p) {
    U v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline float sum(F v) {
    float lanes[LANES];
    store(lanes, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

// ---- numbers of other widths, 16 at a time

inline F from_half(const uint8_t* p) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    typedef uint16_t H __attribute__((vector_size(32)));
    H h;
    std::memcpy(&h, p, sizeof h);
    U u = __builtin_convertvector(h, U);
    // The exponents' biases differ by 112; finite numbers only.
    F magnitude = (F)((u & 0x7fffu) << 13) * splat(0x1p112f);
    return (F)((U)magnitude | ((u & 0x8000u) << 16));
#endif
}
inline F from_bf16(const uint8_t* p) {
#if defined(__AVX512F__)
    return (F)((U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#else
    typedef uint16_t H __attribute__((vector_size(32)));
    H h;
    std::memcpy(&h, p, sizeof h);
    return (F)(__builtin_convertvector(h, U) << 16);
#endif
}
inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline F exponential(F x) {  // to 2 units of the last place; 0 below -87
    const F lowest = splat(-87.0f), highest = splat(88.0f);
    const I is_zero = x < lowest;
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    const F magic = splat(12582912.0f);
    const F n = x * splat(1.44269504f) + magic - magic;
    F r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    F p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    const I power = (__builtin_convertvector(n, I) + 127) << 23;
    p = p * (F)power;
    return is_zero ? F{} : p;
}

}  // namespace
