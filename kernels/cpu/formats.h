// How a tile of 32 outputs keeps its codes and scales (packing.py writes them), and their unpacking.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

typedef int16_t Words __attribute__((vector_size(32)));

constexpr int TILE = 2 * LANES, BLOCK = 32, QUAD = 4;

struct Four {  // 4 bits, unsigned; w = scale * q + offset
    static constexpr bool has_offset = true, has_scale = true, is_signed = false;
    static constexpr int quad_bytes = 64;  // of 4 inputs
    static inline void unpack(const uint8_t* p, int input, const F* scale, const F* offset, F* w) {
        const U v = words(p);
        for (int half = 0; half < 2; half++) {
            const I q = (I)(v >> (8 * input + 4 * half)) & 15;
            w[half] = converted<F>(q) * scale[half] + offset[half];
        }
    }
    static inline void bytes(const uint8_t* p, U* w) {
        const U v = words(p);
        w[0] = v & 0x0f0f0f0fu;
        w[1] = v >> 4 & 0x0f0f0f0fu;
    }
    // Of eight outputs of either half: two inputs of four, the even or the odd ones.
    static inline void pairs(const uint8_t* p, int odd, Words* w) {
        Words v;
        std::memcpy(&v, p, sizeof v);
        for (int half = 0; half < 2; half++) w[half] = v >> (8 * odd + 4 * half) & 15;
    }
};
struct Eight {  // 8 bits, signed; w = scale * q
    static constexpr bool has_offset = false, has_scale = true, is_signed = true;
    static constexpr int quad_bytes = 128;
    static inline void unpack(const uint8_t* p, int input, const F* scale, const F*, F* w) {
        for (int half = 0; half < 2; half++) {
            const I q = (I)(words(p + 64 * half) << (24 - 8 * input)) >> 24;
            w[half] = converted<F>(q) * scale[half];
        }
    }
    static inline void bytes(const uint8_t* p, U* w) {  // 128 more than they are
        for (int half = 0; half < 2; half++) w[half] = words(p + 64 * half) ^ 0x80808080u;
    }
    static inline void pairs(const uint8_t* p, int odd, Words* w) {
        for (int half = 0; half < 2; half++) {
            Words v;
            std::memcpy(&v, p + 64 * half, sizeof v);
            w[half] = odd ? v >> 8 : v << 8 >> 8;
        }
    }
};
struct Plain {  // float32
    static constexpr bool has_offset = false, has_scale = false, is_signed = true;
    static constexpr int quad_bytes = QUAD * TILE * 4;
    static inline void unpack(const uint8_t* p, int input, const F*, const F*, F* w) {
        for (int half = 0; half < 2; half++)
            w[half] = load((const float*)p + input * TILE + half * LANES);
    }
};
struct HalfScale {
    static constexpr int bytes = 2;
    static inline F get(const uint8_t* p) { return from_half(p); }
#if defined(__AVX2__)
    static inline __m256 eight(const uint8_t* p, int first) {
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + bytes * first)));
    }
#endif
};
struct FloatScale {
    static constexpr int bytes = 4;
    static inline F get(const uint8_t* p) { return load((const float*)p); }
#if defined(__AVX2__)
    static inline __m256 eight(const uint8_t* p, int first) {
        return _mm256_loadu_ps((const float*)p + first);
    }
#endif
};

template <class CODES, class SCALE, int GROUP>
struct Format {
    using Codes = CODES;
    using Scale = SCALE;
    static constexpr int group = GROUP;
    static constexpr int vectors = Codes::has_scale + Codes::has_offset;
    static constexpr int scale_bytes = vectors * TILE * Scale::bytes;  // of a group
    static constexpr int code_bytes = GROUP / QUAD * Codes::quad_bytes;
    static constexpr int block_bytes = BLOCK / GROUP * (scale_bytes + code_bytes);

    static inline void scales(const uint8_t* at, F* scale, F* offset) {
        for (int half = 0; half < 2; half++) {
            constexpr int step = LANES * Scale::bytes;
            if (Codes::has_scale) scale[half] = Scale::get(at + half * step);
            if (Codes::has_offset) offset[half] = Scale::get(at + (2 + half) * step);
        }
    }
};

}  // namespace
