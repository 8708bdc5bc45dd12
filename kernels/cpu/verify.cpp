// Verification in one call, a draw for each sequence in another, and all drafts of a step in a third:
// each reads the requests' slots and writes them. They compute what the references of kernels/verify
// do, in their order and with their fixed-point sums; only the last bits of exponentials and
// logarithms are others.

#include <numeric>

#include "batch.h"
#include "philox.h"
#include "rows.h"

namespace {

constexpr int MOST_DRAFTS = 32;  // kernels/verify/sampling.py, as the next
constexpr int BLOCK_RULE = 1, MATCH_RULE = 2;
constexpr uint32_t ACCEPT = 1, FINAL = 2, OF_GROUP = 3;  // kernels/verify/philox.py

// The first index whose inclusive prefix sum exceeds the target.
int64_t choose(const int64_t* weight, int64_t count, int64_t target) {
    int64_t before = 0, i = 0;
    for (; i < count - 1; i++)
        if ((before += weight[i]) > target) break;
    return i;
}

// floor(w * total / 2**40) with 40 bits of two words; total < 2**42.
int64_t pick(uint32_t high, uint32_t low, int64_t total) {
    const int64_t w = (int64_t)high << 8 | low >> 24;
    return (w * (total >> 20) + (w * (total & 0xFFFFF) >> 20)) >> 20;
}

float uniform(uint32_t word) { return ((float)(word >> 9) + 0.5f) * 0x1p-23f; }

float exponential_variate(uint32_t word) {
    const float v = std::min(((float)word + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
    if (v >= 0.1f) return -std::log(1.0f - v);
    float series = 1.0f / 6;
    for (int i = 5; i > 0; i--) series = 1.0f / (float)i + v * series;
    return v * series;
}

class Request {
public:
    Request(const Step& step, int b)
        : step_(step),
          b_(b),
          k_(step.num_drafts == nullptr ? 0 : step.num_drafts[b]),
          first_row_(step.first_rows == nullptr ? b : step.first_rows[b]),
          entry_(step.entries[b]),
          anchor_(step.num_tokens[entry_]),
          position_(anchor_ + (step.offset == nullptr ? 0 : step.offset[b])),
          is_greedy_(step.temperature[entry_] <= 0),
          token_ids_(step.token_ids + entry_ * step.token_stride + anchor_) {}

    void verify() {
        int accepted = 0;
        int64_t last = -1;  // a bad row's
        if (is_greedy_ || step_.rule[entry_] == MATCH_RULE) {
            for (;; accepted++) {
                if (is_greedy_) {
                    const RawRow logits = row_of(step_, first_row_ + accepted);
                    last = logits.choice(logits.highest());
                } else {
                    last = own_token(accepted);
                }
                if (accepted == k_ || last < 0 || last != draft(accepted)) break;
            }
        } else {
            float scale = 0.0f;
            accepted = step_.rule[entry_] == BLOCK_RULE ? accept_block(scale) : accept_each();
            last = draw(accepted, scale);
        }
        const int columns = step_.columns + 1;
        int64_t* to = step_.out + (int64_t)b_ * (columns + 1);
        for (int j = 0; j < columns; j++) to[j] = j < accepted ? draft(j) : -1;
        to[accepted] = std::max<int64_t>(last, 0);
        to[columns] = last < 0;
        for (int j = 0; j < columns; j++) token_ids_[j] = (int32_t)std::max<int64_t>(to[j], 0);
        if (anchor_ > 0) step_.num_tokens[entry_] += accepted + 1;
    }

    // Draw the token `offset` after the anchor, and keep what it was drawn from. Returns the highest
    // logit; NaN of a bad row.
    float draw_draft() {
        const int offset = (int)(position_ - anchor_);
        const RawRow logits = row_of(step_, first_row_);
        float* state = nullptr;
        if (step_.draft_state != nullptr) {
            const int64_t at = entry_ * step_.draft_stride + offset * step_.draft_column_stride;
            const int width = step_.is_bf16 ? 2 : 4;
            std::memcpy(step_.draft_logits + at * width, logits.data, step_.draft_width * width);
            state = draft_state(offset);
        }
        int64_t token;
        float highest;
        if (is_greedy_) {
            highest = logits.highest();
            token = logits.choice(highest);
        } else {
            token = step_.rule[entry_] == MATCH_RULE ? own_token(0) : draw(0, 0.0f);
            highest = read(0).is_bad ? NAN : read(0).state[MAX];
        }
        if (state != nullptr) std::memcpy(state, read(0).state, sizeof Row::state);
        step_.out[b_] = std::max<int64_t>(token, 0);
        token_ids_[offset] = (int32_t)step_.out[b_];
        return highest;
    }

private:
    int64_t draft(int i) const { return token_ids_[i]; }

    // The row after j drafts.
    const Row& read(int j) {
        if (rows_.size() <= (size_t)k_) rows_.resize(k_ + 1);
        if (!(read_ >> j & 1)) rows_[j].read(step_, entry_, first_row_ + j);
        read_ |= (uint64_t)1 << j;
        return rows_[j];
    }
    Distribution target(int j) {
        const Row& row = read(j);
        return {row.x, row.state, row.inverse_t};
    }

    float* draft_state(int i) const {
        return step_.draft_state + entry_ * step_.draft_state_stride + i * 4;
    }
    bool is_one_hot(int i) const {
        return step_.draft_logits == nullptr || std::isnan(draft_state(i)[LOG_Z]);
    }
    RawRow draft_logits(int i) const {
        const int64_t at = entry_ * step_.draft_stride + i * step_.draft_column_stride;
        const uint8_t* data = step_.draft_logits + at * (step_.draft_is_bf16 ? 2 : 4);
        return {data, step_.draft_is_bf16, std::min(step_.draft_width, step_.vocab_size)};
    }
    Distribution drafted(int i) { return {draft_logits(i), draft_state(i), read(i).inverse_t}; }
    float log_probability_of_draft(int i) {
        const int64_t id = draft(i);
        if (id >= draft_logits(i).width) return -INFINITY;
        return drafted(i).log_probability(id);
    }

    float accept_uniform(int i) const {
        if (step_.words != nullptr) return uniform((uint32_t)words(i)[0]);
        uint32_t drawn[4];
        const uint32_t counter[4] = {(uint32_t)anchor_, (uint32_t)i, ACCEPT, 0};
        philox((uint64_t)step_.seed[entry_], counter, drawn);
        return uniform(drawn[0]);
    }
    const int64_t* words(int i) const {
        return step_.words + ((int64_t)b_ * (step_.columns + 2) + i) * 4;
    }

    // log p(X) - log q(X); -inf if either is 0.
    float log_ratio(int i) {
        const int64_t id = draft(i);
        if (id < 0 || id >= step_.vocab_size || read(i).is_bad) return -INFINITY;
        const float p = target(i).log_probability(id);
        const float q = is_one_hot(i) ? 0.0f : log_probability_of_draft(i);
        return p > -INFINITY && q > -INFINITY ? p - q : -INFINITY;
    }

    int accept_each() {
        int i = 0;
        while (i < k_ && std::log(accept_uniform(i)) <= log_ratio(i)) i++;
        return i;
    }

    // kernels/verify/decide.py states the rule. `log_scale` becomes that of the row to draw from.
    int accept_block(float& log_scale) {
        float u[MOST_DRAFTS], scale[MOST_DRAFTS + 1] = {};
        int certain = 0;
        for (int i = 0; i < k_; i++) {
            u[i] = accept_uniform(i);
            scale[i + 1] = std::min(scale[i] + log_ratio(i), 0.0f);
            if (scale[i + 1] == 0.0f) certain = i + 1;
        }
        if (k_ == 0 || std::log(u[k_ - 1]) <= scale[k_]) return k_;
        int accepted = k_ - 1;
        for (; accepted > certain; accepted--) {
            if (!(std::log(u[accepted - 1]) <= scale[accepted])) continue;
            const Row& row = read(accepted);
            mass_total_ = weights(accepted, scale[accepted]).masses(row, mass_);
            mass_row_ = accepted;
            const float z = (float)mass_total_ / ONE;
            const float h = z / (z + 1.0f - std::exp(scale[accepted]));
            if (u[accepted - 1] <= h || std::isnan(h)) break;
        }
        log_scale = scale[accepted];
        return accepted;
    }

    Weights weights(int j, float log_scale) {
        Weights weights{target(j), {}};
        if (j < k_) {
            weights.scale = std::exp(log_scale);
            weights.has_q = !is_one_hot(j);
            if (weights.has_q)
                weights.q = drafted(j);
            else
                weights.one_hot = draft(j);
        }
        return weights;
    }

    // The token after j drafts, by inverse CDF: first a block, then a token of it. -1: a bad row.
    int64_t draw(int j, float log_scale) {
        const Row& row = read(j);
        if (row.is_bad) return -1;
        uint32_t w[4];
        const int64_t* given = step_.words == nullptr ? nullptr : words(step_.columns + 1);
        const uint32_t counter[4] = {
            (uint32_t)anchor_, (uint32_t)(position_ - anchor_ + j),
            (uint32_t)step_.purpose, 0
        };
        philox((uint64_t)step_.seed[entry_], counter, w);
        for (int i = 0; given != nullptr && i < 4; i++) w[i] = (uint32_t)given[i];

        const bool from_sums = j == k_ && !row.is_filtered(step_, entry_);
        Weights weights = this->weights(j, log_scale);
        int64_t total = 0;
        if (from_sums) {
            mass_.resize(row.blocks);
            for (int block = 0; block < row.blocks; block++) {
                const float relative = (row.block_max[block] - row.state[MAX]) * row.inverse_t;
                const float p = row.block_total[block] * std::exp(relative - row.state[LOG_Z]);
                total += mass_[block] = (int64_t)(p * ONE);
            }
        } else {
            total = j == mass_row_ ? mass_total_ : weights.masses(row, mass_);
            if (total == 0 && j < k_) {  // rounding rejected the draft although p = q
                weights = Weights{target(j), {}};
                total = weights.masses(row, mass_);
            }
        }
        const int64_t block = choose(mass_.data(), row.blocks, pick(w[0], w[1], total));
        int64_t fixed[BLOCK], sum = 0;
        for (int i = 0; i < BLOCK; i += LANES) {
            const int at = (int)block * BLOCK + i;
            F weight;
            if (from_sums) {  // normalised by the block, so that few bits are lost in a light one
                const F relative = (row.x.padded(at) - splat(row.block_max[block])) * splat(row.inverse_t);
                weight = exponential(relative) / splat(row.block_total[block]);
            } else {
                weight = weights(at);
            }
            for (int lane = 0; lane < LANES; lane++)
                sum += fixed[i + lane] = (int64_t)(weight[lane] * ONE);
        }
        const int64_t inner = choose(fixed, BLOCK, pick(w[2], w[3], sum));
        return std::min<int64_t>(block * BLOCK + inner, step_.vocab_size - 1);
    }

    // `match`: the token with the highest log p - log E; kernels/verify/match.py. -1: a bad row.
    int64_t own_token(int j) {
        const Row& row = read(j);
        if (row.is_bad) return -1;
        thread_local std::vector<float> bounds;
        const uint32_t position = (uint32_t)(position_ + j);
        const int groups = (step_.vocab_size + GROUP - 1) / GROUP;
        const Distribution p = target(j);
        bounds.resize(groups);
        int likeliest = 0;
        for (int g = 0; g < groups; g++) {
            const float least = exponential_variate(least_of(g, position).word) / GROUP;
            const bool possible = row.group_max[g] >= row.state[THRESHOLD] && row.group_max[g] > -INFINITY;
            // 0.01 is more than the rounding error between this bound and a token's own score.
            const float bound = (row.group_max[g] - row.state[MAX]) * row.inverse_t -
                                row.state[LOG_Z] - std::log(least) + 0.01f;
            bounds[g] = possible ? bound : -INFINITY;
            if (bounds[g] > bounds[likeliest]) likeliest = g;
        }
        float best = -INFINITY;
        int64_t token = step_.vocab_size - 1;
        auto look_at = [&](int g) {
            const Least least = least_of(g, position);
            uint32_t drawn[4];
            for (int i = 0; i < GROUP; i++) {
                const int64_t id = (int64_t)g * GROUP + i;
                const uint32_t counter[4] = {position, 0, FINAL, (uint32_t)(id / 4)};
                if (i % 4 == 0) philox((uint64_t)step_.seed[entry_], counter, drawn);
                if (id >= step_.vocab_size) break;
                const float value = p.log_probability(id);
                if (value == -INFINITY) continue;
                float noise = exponential_variate(least.word) / GROUP;
                if ((int)least.place != i) noise += exponential_variate(drawn[i % 4]);
                const float score = value - std::log(noise);
                if (score > best || (score == best && id < token)) {
                    best = score;
                    token = id;
                }
            }
        };
        look_at(likeliest);
        for (int g = 0; g < groups; g++)
            if (g != likeliest && bounds[g] > -INFINITY && bounds[g] >= best) look_at(g);
        return token;
    }
    struct Least {
        uint32_t word, place;
    };
    Least least_of(int group, uint32_t position) const {
        uint32_t drawn[4];
        const uint32_t counter[4] = {position, 0, OF_GROUP, (uint32_t)(group / 2)};
        philox((uint64_t)step_.seed[entry_], counter, drawn);
        const int at = group % 2 * 2;
        return {drawn[at], drawn[at + 1] >> 26};
    }

    const Step& step_;
    const int b_, k_;
    const int64_t first_row_, entry_, anchor_, position_;
    const bool is_greedy_;
    int32_t* token_ids_;  // from the first draft on
    uint64_t read_ = 0;  // a bit for each of `rows_`
    int mass_row_ = -1;      // whose residual `mass_` and its total are of
    int64_t mass_total_ = 0;
    static thread_local std::vector<Row> rows_;  // of this request, by the drafts before them
    static thread_local std::vector<int64_t> mass_;
};

thread_local std::vector<Row> Request::rows_;
thread_local std::vector<int64_t> Request::mass_;

}  // namespace

extern "C" {

#define PUBLIC __attribute__((visibility("default")))

PUBLIC void outrider_verify(const Step* step) {
    for (int b = 0; b < step->count; b++) Request(*step, b).verify();
}

PUBLIC void outrider_draw(const Step* step) {
    for (int b = 0; b < step->count; b++) (void)Request(*step, b).draw_draft();
}

// All drafts of a step, by a model's passes and draws in turn. The first pass is given, with a row of
// logits for each of the step's sequences; the others read their newest draft. A sequence gets up to
// counts[i] drafts, and no more once the chance of all so far is below least[i]; counts[i] becomes
// their number. Shape: counts, least [count].
PUBLIC void outrider_draft(
    const Decoder* model, const Batch* given_batch, const Slots* given_rows, int32_t threads,
    const Step* given_step, int64_t* counts, const double* least
) {
    Batch batch = *given_batch;
    Slots rows = *given_rows;
    Step step = *given_step;
    int left = step.count;
    outrider_pass_in_slots(model, &batch, &rows, threads);
    std::vector<int64_t> slots(step.entries, step.entries + left), drawn(left), offsets(left);
    std::vector<int64_t> starts(left), ones(left, 1);
    std::vector<double> chance(left, 1.0);
    std::vector<float> highest(left);
    std::vector<int> sequence(left);  // each one's index in counts and least
    std::iota(sequence.begin(), sequence.end(), 0);
    step.entries = rows.slots = slots.data();
    step.offset = offsets.data();
    step.out = drawn.data();
    rows.starts = starts.data();
    rows.row_counts = rows.logits_counts = ones.data();
    for (int j = 0;; j++) {
        step.count = left;
        std::fill_n(offsets.begin(), left, j);
        for (int i = 0; i < left; i++) highest[i] = Request(step, i).draw_draft();
        left = 0;
        for (int i = 0; i < step.count; i++) {
            const int s = sequence[i];
            bool goes_on = counts[s] > j + 1;
            if (goes_on && least[s] > 0) {
                const RawRow row = {row_of(step, i).data, step.is_bf16, step.vocab_size};
                chance[s] *= row.probability(drawn[i], highest[i]);
                goes_on = chance[s] >= least[s];
            }
            if (!goes_on) {
                counts[s] = j + 1;
                continue;
            }
            sequence[left] = s;
            slots[left++] = slots[i];
        }
        if (left == 0) return;
        batch.sequences = batch.num_logits = left;
        std::fill_n(starts.begin(), left, j);
        outrider_pass_in_slots(model, &batch, &rows, threads);
    }
}

// Of one token a row, at temperature 1. Shape: data [count][stride], token_ids [count].
PUBLIC void outrider_probabilities(
    const uint8_t* data, int64_t stride, int64_t width, int32_t is_bf16, int32_t count,
    const int64_t* token_ids, float* out
) {
    for (int n = 0; n < count; n++) {
        const RawRow row = {data + n * stride * (is_bf16 ? 2 : 4), is_bf16, width};
        out[n] = row.probability(token_ids[n], row.highest());
    }
}
}
