// Parts of drawing and verification in one call each: greedy ones, what a draft is believed to be
// worth, and random words. kernels/verify/greedy.py and philox.py say what they compute.

#include <algorithm>
#include <cmath>
#include <vector>

#include "philox.h"
#include "vectors.h"

extern "C" {

struct Logits {
    const uint8_t* data;  // [rows][stride] numbers of float32 or bfloat16
    int64_t stride, vocab_size;
    int32_t is_bf16;
};

struct Slots {
    int32_t* token_ids;  // [slots][stride]
    int64_t stride;
    int64_t* num_tokens;  // [slots]; the last slot is nobody's
    int64_t count;
};
}

namespace {

template <bool BF16>
struct Row {
    const uint8_t* data;
    int64_t width;

    Row(const Logits& logits, int64_t row)
        : data(logits.data + row * logits.stride * (BF16 ? 2 : 4)), width(logits.vocab_size) {}

    F vector(int64_t at) const {
        return BF16 ? from_bf16(data + 2 * at) : load((const float*)data + at);
    }
    float operator[](int64_t at) const {
        float x;
        if (BF16) {
            uint16_t half;
            std::memcpy(&half, data + 2 * at, 2);
            const uint32_t bits = (uint32_t)half << 16;
            std::memcpy(&x, &bits, 4);
        } else {
            std::memcpy(&x, data + 4 * at, 4);
        }
        return x;
    }
    // The highest logit; NaN if there is one.
    float highest() const {
        F most = splat(-INFINITY);
        I is_nan = {};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const F x = vector(i);
            is_nan |= x != x;
            most = select(x > most, x, most);
        }
        float best = -INFINITY;
        bool bad = false;
        for (int lane = 0; lane < LANES; lane++) {
            bad |= is_nan[lane] != 0;
            best = std::max(best, most[lane]);
        }
        for (; i < width; i++) {
            bad |= std::isnan((*this)[i]);
            best = std::max(best, (*this)[i]);
        }
        return bad ? NAN : best;
    }
    // The first token that has this logit.
    int64_t first_of(float value) const {
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const I same = vector(i) == splat(value);
            I any = same;
            int found = 0;
            for (int lane = 0; lane < LANES; lane++) found |= any[lane];
            if (found) break;
        }
        while (i < width && (*this)[i] != value) i++;
        return i;
    }
    // The first choice; -1 if a logit is NaN or infinite, or none is finite.
    int64_t choice() const {
        const float best = highest();
        return std::isfinite(best) ? first_of(best) : -1;
    }
    float probability(int64_t token) const {
        const float best = highest();
        F total = {};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) total += exponential(vector(i) - splat(best));
        float rest = 0.0f;
        for (; i < width; i++) rest += std::exp((*this)[i] - best);
        return std::exp((*this)[token] - best) / (sum(total) + rest);
    }
};

template <bool BF16>
void verify(
    const Logits& logits, const Slots& slots, int count, const int32_t* first_rows,
    const int32_t* slot, const int32_t* num_drafts, int columns, int64_t* out
) {
    for (int b = 0; b < count; b++) {
        int32_t* known = slots.token_ids + slot[b] * slots.stride + slots.num_tokens[slot[b]];
        int64_t* to = out + (int64_t)b * (columns + 2);
        std::fill(to, to + columns + 1, -1);
        int accepted = 0;
        int64_t own;
        for (;; accepted++) {
            own = Row<BF16>(logits, first_rows[b] + accepted).choice();
            if (accepted == num_drafts[b] || own < 0 || own != known[accepted]) break;
            to[accepted] = own;
        }
        to[accepted] = std::max<int64_t>(own, 0);
        to[columns + 1] = own < 0;
        for (int j = 0; j <= columns; j++) known[j] = (int32_t)std::max<int64_t>(to[j], 0);
        slots.num_tokens[slot[b]] += accepted + 1;
        slots.num_tokens[slots.count - 1] = 0;
    }
}

template <bool BF16>
void draft(
    const Logits& logits, const Slots& slots, int count, const int64_t* slot,
    const int64_t* offset, int64_t* out
) {
    for (int n = 0; n < count; n++) {
        out[n] = std::max<int64_t>(Row<BF16>(logits, n).choice(), 0);
        const int64_t position = slots.num_tokens[slot[n]] + offset[n];
        slots.token_ids[slot[n] * slots.stride + position] = (int32_t)out[n];
    }
}

}  // namespace

extern "C" {

#define PUBLIC __attribute__((visibility("default")))

PUBLIC void outrider_verify_greedy(
    const Logits* logits, const Slots* slots, int32_t count, const int32_t* first_rows,
    const int32_t* slot, const int32_t* num_drafts, int32_t columns, int64_t* out
) {
    auto how = logits->is_bf16 ? verify<true> : verify<false>;
    how(*logits, *slots, count, first_rows, slot, num_drafts, columns, out);
}

PUBLIC void outrider_draft_greedy(
    const Logits* logits, const Slots* slots, int32_t count, const int64_t* slot,
    const int64_t* offset, int64_t* out
) {
    auto how = logits->is_bf16 ? draft<true> : draft<false>;
    how(*logits, *slots, count, slot, offset, out);
}

// Counters that fit 32 bits, [4][count], and words likewise.
PUBLIC void outrider_philox(
    int32_t count, const int64_t* seeds, const int64_t* counters, int64_t* words
) {
    for (int n = 0; n < count; n++) {
        uint32_t counter[4], drawn[4];
        for (int i = 0; i < 4; i++) counter[i] = (uint32_t)counters[(int64_t)i * count + n];
        philox((uint64_t)seeds[n], counter, drawn);
        for (int i = 0; i < 4; i++) words[(int64_t)i * count + n] = drawn[i];
    }
}

PUBLIC void outrider_probabilities(
    const Logits* logits, int32_t count, const int64_t* token_ids, float* out
) {
    for (int n = 0; n < count; n++)
        out[n] = logits->is_bf16 ? Row<true>(*logits, n).probability(token_ids[n])
                                 : Row<false>(*logits, n).probability(token_ids[n]);
}
}
