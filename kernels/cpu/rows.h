// Rows of logits and their processed distributions, as kernels/verify/scan.py, row_state.py and
// residual.py define them.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "vectors.h"

extern "C" {

struct Step {  // a batch; kernels/verify/cpu.py fills it in
    const uint8_t* logits;  // [rows][stride] of float32 or bfloat16
    int64_t stride;
    int32_t vocab_size, is_bf16;
    int32_t count, columns;                  // requests, most drafts of one: K
    const int32_t *first_rows, *num_drafts;  // [count], or null: one row each, no drafts
    const int64_t* entries;  // [count]: each one's slot, its index in the following
    const float* temperature;
    const int32_t* top_k;
    const float *top_p, *min_p;
    const int64_t* seed;
    const int32_t* rule;
    int64_t* num_tokens;  // known ones; 0: a dummy's
    int32_t* token_ids;   // [...][token_stride]: known ones, then drafts
    int64_t token_stride;
    // What drafts are drawn from; null: one-hot. [...][...][draft_width] and [...][...][4]
    uint8_t* draft_logits;
    int64_t draft_stride, draft_column_stride;
    int32_t draft_width, draft_is_bf16;
    float* draft_state;
    int64_t draft_state_stride;
    const int64_t* offset;  // [count] of the token to draw from the anchor; null: 0
    const int64_t* words;   // [count][K + 2][4], or null: Philox's
    int32_t purpose;
    int64_t* out;  // verification: [count][K + 2]; drawing: [count]
};
}

namespace {

constexpr int BLOCK = 1024, GROUP = 64;  // kernels/verify/sampling.py
constexpr int MAX = 0, LOG_Z = 1, THRESHOLD = 2, CUTOFF = 3;
constexpr float ONE = 0x1p40f;  // fixed point
constexpr int FIRST_CANDIDATES = 256, WIDER = 16;

// The sum of a block's numbers, at most 1 each, as multiples of 2**-40: exact in any order. In two
// halves of 20 bits, as few processors make integers of 64 bits from floats.
struct Mass {
    I high = {}, low = {};
    void add(F weight) {
        weight *= splat(0x1p20f);
        const I whole = converted<I>(weight);
        high += whole;
        low += converted<I>((weight - converted<F>(whole)) * splat(0x1p20f));
    }
    int64_t total() const {
        int64_t all = 0;
        for (int i = 0; i < LANES; i++) all += ((int64_t)high[i] << 20) + low[i];
        return all;
    }
};

// A row of float32 or bfloat16, as it is.
struct RawRow {
    const uint8_t* data;
    int32_t is_bf16;
    int64_t width;

    F vector(int64_t at) const {
        return is_bf16 ? from_bf16(data + 2 * at) : load((const float*)data + at);
    }
    float operator[](int64_t at) const {
        float x;
        if (is_bf16) {
            uint16_t half;
            std::memcpy(&half, data + 2 * at, 2);
            const uint32_t bits = (uint32_t)half << 16;
            std::memcpy(&x, &bits, 4);
        } else {
            std::memcpy(&x, data + 4 * at, 4);
        }
        return x;
    }
    // Behind the row's end all is -inf.
    F padded(int64_t at) const {
        if (at + LANES <= width) return vector(at);
        float lanes[LANES];
        for (int i = 0; i < LANES; i++) lanes[i] = at + i < width ? (*this)[at + i] : -INFINITY;
        return load(lanes);
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
        float best = ::highest(most);
        bool bad = any(is_nan);
        for (; i < width; i++) {
            bad |= std::isnan((*this)[i]);
            best = std::max(best, (*this)[i]);
        }
        return bad ? NAN : best;
    }
    // The first token that has this logit.
    int64_t first_of(float value) const {
        int64_t i = 0;
        while (i + LANES <= width && !any(vector(i) == splat(value))) i += LANES;
        while (i < width && (*this)[i] != value) i++;
        return i;
    }
    // The first choice, which has the highest logit `best`; -1 if one is NaN or infinite, or none
    // is finite.
    int64_t choice(float best) const {
        return std::isfinite(best) ? first_of(best) : -1;
    }
    // At temperature 1; `best` is the highest logit.
    float probability(int64_t token, float best) const {
        F total = {};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) total += exponential(vector(i) - splat(best));
        float rest = 0.0f;
        for (; i < width; i++) rest += std::exp((*this)[i] - best);
        return std::exp((*this)[token] - best) / (sum(total) + rest);
    }
};

RawRow row_of(const Step& step, int64_t row) {
    const int64_t at = row * step.stride * (step.is_bf16 ? 2 : 4);
    return {step.logits + at, step.is_bf16, step.vocab_size};
}

// A row's logits, which stay where they are, and their distribution.
struct Row {
    RawRow x;
    std::vector<float> block_max, block_total, group_max;
    int vocab_size = 0, blocks = 0;
    bool is_bad = false;
    float state[4], inverse_t = 1.0f;

    // False if a logit is NaN.
    bool find_maxima() {
        group_max.resize((size_t)blocks * (BLOCK / GROUP));
        block_max.resize(blocks);
        I is_nan = {};
        for (size_t g = 0; g < group_max.size(); g++) {
            F most = splat(-INFINITY);
            for (int i = 0; i < GROUP; i += LANES) {
                const F v = x.padded(g * GROUP + i);
                is_nan |= v != v;
                most = select(v > most, v, most);
            }
            group_max[g] = ::highest(most);
        }
        for (int b = 0; b < blocks; b++) {
            const float* first = &group_max[b * (BLOCK / GROUP)];
            block_max[b] = *std::max_element(first, first + BLOCK / GROUP);
        }
        state[MAX] = *std::max_element(block_max.begin(), block_max.end());
        return !any(is_nan);
    }

    // `b` is the request's entry.
    void read(const Step& step, int64_t b, int64_t row) {
        x = row_of(step, row);
        vocab_size = step.vocab_size;
        blocks = (vocab_size + BLOCK - 1) / BLOCK;
        const bool whole = find_maxima();
        is_bad = !whole || !std::isfinite(state[MAX]);
        const float t = step.temperature[b];
        inverse_t = t > 0 ? 1.0f / t : 1.0f;
        state[LOG_Z] = is_bad ? NAN : 0.0f;
        state[THRESHOLD] = -INFINITY;
        state[CUTOFF] = (float)vocab_size;
        if (!is_bad && t > 0) normalise(step, b);
    }

    void normalise(const Step& step, int64_t b) {
        if (is_filtered(step, b) && (has_top_k(step, b) || step.top_p[b] >= 1.0f)) {
            filter(step, b, 0.0);  // of the tokens that it keeps alone
            return;
        }
        block_total.resize(blocks);
        double z = 0.0;
        for (int block = 0; block < blocks; block++) {
            const F most = splat(std::max(block_max[block], std::numeric_limits<float>::lowest()));
            Mass mass;
            for (int i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES)
                mass.add(exponential((x.padded(i) - most) * splat(inverse_t)));
            block_total[block] = (float)mass.total() / ONE;
            const float relative = std::exp((block_max[block] - state[MAX]) * inverse_t);
            z += (double)block_total[block] * relative;
        }
        state[LOG_Z] = (float)std::log(z);
        if (is_filtered(step, b)) filter(step, b, z);
    }

    bool is_filtered(const Step& step, int64_t b) const {
        return has_top_k(step, b) || step.top_p[b] < 1.0f || step.min_p[b] > 0.0f;
    }
    bool has_top_k(const Step& step, int64_t b) const {
        return step.top_k[b] > 0 && step.top_k[b] < vocab_size;
    }

    // The highest logits, in falling order.
    void highest(int count, std::vector<float>& values) const {
        values.clear();
        float bound = -INFINITY;
        if (count <= (int)group_max.size()) {  // so many groups reach it, and no fewer logits
            values = group_max;
            std::nth_element(
                values.begin(), values.begin() + count - 1, values.end(), std::greater<>()
            );
            bound = values[count - 1];
            values.clear();
        }
        for (int i = 0; i < vocab_size; i++) {
            if (i % GROUP == 0 && group_max[i / GROUP] < bound)
                i += GROUP - 1;
            else if (x[i] >= bound)
                values.push_back(x[i]);
        }
        auto last = values.begin() + count;
        if (last < values.end())
            std::nth_element(values.begin(), last, values.end(), std::greater<>());
        std::sort(values.begin(), last, std::greater<>());
        values.resize(count);
    }

    // `z` is needed for top_p without top_k.
    void filter(const Step& step, int64_t b, double z) {
        thread_local std::vector<float> value;
        thread_local std::vector<int64_t> total;
        const bool by_k = has_top_k(step, b);
        const int most = by_k ? step.top_k[b] : vocab_size;
        int count = by_k ? most : std::min(FIRST_CANDIDATES, vocab_size), kept;
        for (;; count = (int)std::min<int64_t>((int64_t)count * WIDER, vocab_size)) {
            highest(count, value);
            total.resize(count);
            int64_t sum = 0;
            int likely = 0;
            for (int i = 0; i < count; i++) {
                const float relative = std::exp((value[i] - value[0]) * inverse_t);
                likely += relative >= step.min_p[b];
                total[i] = sum += (int64_t)(relative * ONE);
            }
            kept = count;
            if (step.top_p[b] < 1.0f) {
                const double mass = by_k ? (double)sum : z * ONE, limit = step.top_p[b] * mass;
                kept = 0;
                while (kept < count && (kept ? (double)total[kept - 1] : 0.0) < limit) kept++;
            }
            if (step.min_p[b] > 0.0f) kept = std::min(kept, likely);
            if (kept < count || count == most) break;
        }
        const int last = std::max(0, kept - 1);
        const float threshold = value[last];
        int ties = 0;  // of those kept
        while (ties <= last && value[last - ties] == threshold) ties++;
        int cutoff = vocab_size, seen = 0;
        for (int i = 0; i < vocab_size && seen <= ties; i++) {
            if (i % GROUP == 0 && group_max[i / GROUP] < threshold) {
                i += GROUP - 1;
            } else if (x[i] == threshold && seen++ < ties) {
                cutoff = i;  // so far; the loop ends at one more than are kept
            }
        }
        if (seen <= ties) cutoff = vocab_size;
        state[LOG_Z] = (float)std::log((double)total[last] / ONE);
        state[THRESHOLD] = threshold;
        state[CUTOFF] = (float)cutoff;
    }
};

// Logits and a state.
struct Distribution {
    RawRow x;
    const float* state;
    float inverse_t;

    float log_probability(int64_t id) const { return log_probability(id, x[id]); }
    float log_probability(int64_t id, float value) const {
        const bool kept = value > state[THRESHOLD] ||
                          (value == state[THRESHOLD] && (float)id <= state[CUTOFF]);
        if (!kept || !(value > -INFINITY)) return -INFINITY;
        return (value - state[MAX]) * inverse_t - state[LOG_Z];
    }
    F probabilities(int i) const {
        const F value = x.padded(i);
        F p = exponential((value - splat(state[MAX])) * splat(inverse_t) - splat(state[LOG_Z]));
        if (state[THRESHOLD] > -INFINITY) {
            const F threshold = splat(state[THRESHOLD]);
            const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const I kept = (value > threshold) |
                           ((value == threshold) & (lane + i <= (int)state[CUTOFF]));
            p = select(kept, p, F{});
        }
        return p;
    }
};

// max(P p - q, 0) of a row with a draft; p of one without.
struct Weights {
    Distribution p, q;
    float scale = 1.0f;
    bool has_q = false;
    int64_t one_hot = -1;  // the draft, if q is all its

    F operator()(int i) const {
        F weight = p.probabilities(i) * splat(scale);
        if (has_q) weight -= q.probabilities(i);
        if (one_hot >= i && one_hot < i + LANES) {
            float lanes[LANES];
            store(lanes, weight);
            lanes[one_hot - i] = 0.0f;
            weight = load(lanes);
        }
        return select(weight > F{}, weight, F{});
    }
    // `row` is p's.
    int64_t masses(const Row& row, std::vector<int64_t>& of_block) const {
        of_block.assign(row.blocks, 0);
        int64_t total = 0;
        for (int block = 0; block < row.blocks; block++) {
            if (row.block_max[block] < row.state[THRESHOLD]) continue;
            Mass mass;
            for (int i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES) mass.add((*this)(i));
            total += of_block[block] = mass.total();
        }
        return total;
    }
};

}  // namespace
