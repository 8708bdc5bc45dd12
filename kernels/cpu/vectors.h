// Vectors of 16 numbers: loads from several widths, and the exponential.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Inside a function as long as attention's, GCC would call the smallest of these.
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;

#if defined(__AVX512F__)
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));

template <class TO, class FROM>
INLINE TO converted(FROM v) {
    return __builtin_convertvector(v, TO);
}
template <class V>
INLINE V select(I mask, V a, V b) {
    return mask ? a : b;
}
template <class V>
INLINE V read(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
INLINE F splat(float x) { return x - F{}; }
#else
// Several of the processor's vectors: GCC keeps one that is wider than these in memory.
#if defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

template <class T>
struct Sixteen {
    typedef T Part __attribute__((vector_size(WIDTH * sizeof(T))));
    Part part[LANES / WIDTH];

    T operator[](int lane) const { return part[lane / WIDTH][lane % WIDTH]; }
    template <class TO>
    explicit operator Sixteen<TO>() const {  // of the same bits
        Sixteen<TO> to;
        for (int i = 0; i < LANES / WIDTH; i++) to.part[i] = (typename Sixteen<TO>::Part)part[i];
        return to;
    }
};
using F = Sixteen<float>;
using I = Sixteen<int32_t>;
using U = Sixteen<uint32_t>;

template <class TO, class GET>
INLINE TO of_parts(GET get) {
    TO to;
#pragma GCC unroll 4
    for (int i = 0; i < LANES / WIDTH; i++) to.part[i] = get(i);
    return to;
}
#define OPERATION(OPERATOR, TO)                                                    \
    template <class T>                                                             \
    INLINE TO operator OPERATOR(Sixteen<T> a, Sixteen<T> b) {                      \
        return of_parts<TO>([&](int i) { return a.part[i] OPERATOR b.part[i]; });  \
    }                                                                              \
    template <class T>                                                             \
    INLINE TO operator OPERATOR(Sixteen<T> a, std::type_identity_t<T> b) {         \
        return of_parts<TO>([&](int i) { return a.part[i] OPERATOR b; });          \
    }
OPERATION(+, Sixteen<T>)
OPERATION(-, Sixteen<T>)
OPERATION(*, Sixteen<T>)
OPERATION(/, Sixteen<T>)
OPERATION(&, Sixteen<T>)
OPERATION(|, Sixteen<T>)
OPERATION(^, Sixteen<T>)
OPERATION(<<, Sixteen<T>)
OPERATION(>>, Sixteen<T>)
OPERATION(<, I)
OPERATION(<=, I)
OPERATION(>, I)
OPERATION(==, I)
OPERATION(!=, I)
#undef OPERATION
INLINE F operator-(F a) {
    return of_parts<F>([&](int i) { return -a.part[i]; });
}
template <class V>
INLINE V& operator+=(V& a, V b) { return a = a + b; }
template <class V>
INLINE V& operator-=(V& a, V b) { return a = a - b; }
template <class V>
INLINE V& operator*=(V& a, V b) { return a = a * b; }
template <class V>
INLINE V& operator|=(V& a, V b) { return a = a | b; }

template <class TO, class FROM>
INLINE TO converted(FROM v) {
    return of_parts<TO>([&](int i) { return __builtin_convertvector(v.part[i], typename TO::Part); });
}
template <class V>
INLINE V select(I mask, V a, V b) {
    return of_parts<V>([&](int i) { return mask.part[i] ? a.part[i] : b.part[i]; });
}
// Part by part, as GCC copies in smaller pieces, and a load waits for stores of its pieces.
template <class V>
INLINE V read(const void* p) {
    return of_parts<V>([&](int i) {
        typename V::Part part;
        std::memcpy(&part, (const char*)p + i * sizeof part, sizeof part);
        return part;
    });
}
INLINE void store(float* p, F v) {
    for (int i = 0; i < LANES / WIDTH; i++) std::memcpy(p + i * WIDTH, &v.part[i], sizeof v.part[i]);
}
INLINE F splat(float x) {
    return of_parts<F>([&](int) { return x - F::Part{}; });
}
#endif

INLINE F load(const float* p) { return read<F>(p); }
INLINE U words(const uint8_t* p) { return read<U>(p); }

// Lanes of both by their places, those of b after those of a.
template <int... PLACES, class V>
INLINE V shuffled(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, PLACES...);
#else
    typedef decltype(a < b) Places;
    return __builtin_shuffle(a, b, Places{PLACES...});
#endif
}

// Lane i with lane i + N / 2, and so on.
template <int N = LANES, class T, class V, class OPERATION>
INLINE T folded(V v, OPERATION operation) {
    if constexpr (N == 2) {
        return operation(v[0], v[1]);
    } else {
        typedef T Half __attribute__((vector_size(N / 2 * sizeof(T))));
        Half half[2];
        std::memcpy(half, &v, sizeof v);
        return folded<N / 2, T>(operation(half[0], half[1]), operation);
    }
}
INLINE float sum(F v) {
    return folded<LANES, float>(v, [](auto a, auto b) { return a + b; });
}
INLINE int32_t sum(I v) {
    return folded<LANES, int32_t>(v, [](auto a, auto b) { return a + b; });
}
INLINE float highest(F v) {
    return folded<LANES, float>(v, [](auto a, auto b) { return a > b ? a : b; });
}
INLINE bool any(I mask) {
    return folded<LANES, int32_t>(mask, [](auto a, auto b) { return a | b; }) != 0;
}
INLINE int32_t highest(I v) {
    return folded<LANES, int32_t>(v, [](auto a, auto b) { return a > b ? a : b; });
}

#if defined(__AVX2__)
INLINE I rounded(F v) {  // to the nearest integer, of two the even one
#if defined(__AVX512F__)
    return (I)_mm512_cvtps_epi32((__m512)v);
#else
    return of_parts<I>([&](int i) { return (I::Part)_mm256_cvtps_epi32(v.part[i]); });
#endif
}
#endif

// ---- numbers of other widths, 16 at a time

#if !defined(__AVX512F__)
INLINE U widened(const uint8_t* p) {  // from 16 bits
    typedef uint16_t Narrow __attribute__((vector_size(WIDTH * 2)));
    return of_parts<U>([&](int i) {
        Narrow part;
        std::memcpy(&part, p + i * sizeof part, sizeof part);
        return __builtin_convertvector(part, U::Part);
    });
}
#endif
INLINE F from_half(const uint8_t* p) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    const U u = widened(p);
    // The exponents' biases differ by 112; finite numbers only.
    F magnitude = (F)((u & 0x7fffu) << 13) * splat(0x1p112f);
    return (F)((U)magnitude | ((u & 0x8000u) << 16));
#endif
}
INLINE F from_bf16(const uint8_t* p) {
#if defined(__AVX512F__)
    return (F)((U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#else
    return (F)(widened(p) << 16);
#endif
}
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

INLINE F exponential(F x) {  // to 2 units of the last place; 0 below -87
    const F lowest = splat(-87.0f), highest = splat(88.0f);
    const F given = x;
#if defined(__AVX512F__)
    x = (F)_mm512_min_ps((__m512)highest, _mm512_max_ps((__m512)lowest, (__m512)x));
#else
    x = select(x < lowest, lowest, x);
    x = select(x > highest, highest, x);
#endif
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
#if defined(__AVX512F__)  // the same bits in fewer instructions
    const __mmask16 is_more = _mm512_cmp_ps_mask((__m512)given, (__m512)lowest, _CMP_NLT_UQ);
    return (F)_mm512_maskz_scalef_ps(is_more, (__m512)p, (__m512)n);
#else
    const I power = (converted<I>(n) + 127) << 23;
    p = p * (F)power;
    return select(given < lowest, F{}, p);
#endif
}

}  // namespace
