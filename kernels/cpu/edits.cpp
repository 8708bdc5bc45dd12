// Logit edits, a call each: what the references of kernels/edits compute, in place.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr float BANNED = -INFINITY;

struct Rows {  // EditRows of kernels/edits/edit_rows.py, and the logits that they are rows of
    float* logits;
    int64_t stride, width, count;
    const int64_t *row, *slot, *position;  // [count]

    float* logits_of(int64_t i) const { return logits + row[i] * stride; }
};

// The states of kernels/edits, field by field, and after them what else an edit reads.
struct TokenBias {  // entries: [slots, most]
    const int32_t* token_ids;
    const float* bias;
    const int64_t* banned_until;
    const int32_t* num_entries;
};
struct BadWords {  // words: [slots, most of them], their tokens: [slots, most of these]
    const int32_t *words, *ends, *num_words;
    const int64_t* output_start;
    const int32_t* token_ids;  // [slots, room]
};
struct Penalties {
    const float *repetition, *frequency, *presence;
    int32_t* seen;  // [slots, vocab_size], 2 * times in the output + (in the prompt)
    const int64_t* num_counted;
    const int32_t* token_ids;  // [slots, room]
};

}  // namespace

extern "C" {

#define PUBLIC __attribute__((visibility("default")))

PUBLIC void outrider_bitmask(
    const Rows* rows, const uint32_t* const* bitmask, int64_t num_words, int64_t vocab_size
) {
    for (int64_t i = 0; i < rows->count; i++) {
        const uint32_t* words = *bitmask + rows->slot[i] * num_words;
        float* logits = rows->logits_of(i);
        for (int64_t first = 0; first < vocab_size; first += 32) {
            const uint32_t word = words[first / 32];
            if (word == ~0u) continue;
            const int64_t count = std::min<int64_t>(32, vocab_size - first);
            for (int64_t bit = 0; bit < count; bit++)
                if (!(word >> bit & 1)) logits[first + bit] = BANNED;
        }
    }
}

PUBLIC void outrider_token_bias(
    const Rows* rows, const TokenBias* state, int64_t most, int64_t vocab_size
) {
    for (int64_t i = 0; i < rows->count; i++) {
        float* logits = rows->logits_of(i);
        const int64_t slot = rows->slot[i], first = slot * most;
        const int64_t end = first + state->num_entries[slot];
        const auto is_banned = [&](int64_t at) {
            return rows->position[i] < state->banned_until[at] && state->token_ids[at] < vocab_size;
        };
        int64_t num_left = 0;  // other tokens, counted until there is one; before, less the banned
        for (int64_t at = first; at < end; at++)
            num_left -= is_banned(at) && logits[state->token_ids[at]] != BANNED;
        for (int64_t token = 0; num_left <= 0 && token < vocab_size; token++)
            num_left += logits[token] != BANNED;
        for (int64_t at = first; at < end; at++) {
            const int32_t token = state->token_ids[at];
            if (token < vocab_size)
                logits[token] += is_banned(at) && num_left > 0 ? BANNED : state->bias[at];
        }
    }
}

PUBLIC void outrider_bad_words(
    const Rows* rows, const BadWords* state, int64_t most_tokens, int64_t most_words, int64_t room
) {
    for (int64_t i = 0; i < rows->count; i++) {
        const int64_t slot = rows->slot[i], position = rows->position[i];
        const int32_t* end_of_prefix = state->token_ids + slot * room + position;
        const int32_t* begin = state->words + slot * most_tokens;
        for (int32_t w = 0; w < state->num_words[slot]; w++) {
            const int32_t* last =
                state->words + slot * most_tokens + state->ends[slot * most_words + w] - 1;
            const int64_t before = last - begin;
            if (*last < rows->width && before <= position - state->output_start[slot] &&
                std::equal(begin, last, end_of_prefix - before))
                rows->logits_of(i)[*last] = BANNED;
            begin = last + 1;
        }
    }
}

PUBLIC void outrider_penalties(
    const Rows* rows, const Penalties* state, int64_t vocab_size, int64_t room
) {
    for (int64_t i = 0; i < rows->count; i++) {
        const int64_t slot = rows->slot[i];
        const float repetition = state->repetition[slot], frequency = state->frequency[slot];
        int32_t* seen = state->seen + slot * vocab_size;
        const auto count_rest = [&](int32_t times) {
            for (int64_t at = state->num_counted[slot]; at < rows->position[i]; at++)
                seen[state->token_ids[slot * room + at]] += 2 * times;
        };
        count_rest(1);
        float* logits = rows->logits_of(i);
        for (int64_t token = 0; token < std::min(vocab_size, rows->width); token++) {
            if (seen[token] == 0) continue;
            const int32_t count = seen[token] >> 1;
            float logit = logits[token];
            logit = logit > 0 ? logit / repetition : logit * repetition;
            logit -= frequency * (float)count;
            logits[token] = logit - (count > 0 ? state->presence[slot] : 0.0f);
        }
        count_rest(-1);
    }
}

}  // extern "C"
