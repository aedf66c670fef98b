// SPDX-License-Identifier: Apache-2.0
// The choice of experts; a row's result is made from that row alone.

#include "kernels.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kMostExperts = 4096;
constexpr float kInfinity = __builtin_inff();
constexpr float kLeastSum = 1e-20f;  // added to what weights are divided by: all sigmoids may be 0

enum Scores : int64_t { kSoftmax = 0, kSigmoids = 1, kSparseMixer = 2 };

struct Routing {
    const Float32* bias;
    int64_t count, top_k, scores, groups, top_groups, group_members, normalized;
    float scale, reach;

    int64_t group_size() const { return count / groups; }
    int64_t padded() const { return (count + kLanes - 1) / kLanes * kLanes; }
};

// Of all experts; beyond them logits are -inf.
inline void make_scores(Float32* scores, const Routing& routing) {
    const auto each = [&](auto body) {
        for (int64_t i = 0; i < routing.padded(); i += kLanes) body(scores + i);
    };
    if (routing.scores == kSigmoids) {
        each([](Float32* at) { store(at, 1.0f / (exp(-load(at, All{})) + 1.0f), All{}); });
        return;
    }
    Vec most = splat(-kInfinity), total = {};
    each([&](Float32* at) { most = larger(load(at, All{}), most); });
    const Vec first = splat(largest(most));
    each([&](Float32* at) {
        const Vec x = load(at, All{}), power = x == -kInfinity ? Vec{} : exp(x - first);
        store(at, power, All{});
        total = total + power;
    });
    const Vec sums = splat(sum(total));
    each([&](Float32* at) { store(at, load(at, All{}) / sums, All{}); });
}

// The place of the largest of n values, the first of equal ones, which is then taken: never found again while others are left.
// Whatever is NaN is found last but for what is taken.
inline int64_t take_largest(float* values, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i) {
        if (values[i] > values[best] || (values[best] == -kInfinity && values[i] != values[i])) best = i;
    }
    values[best] = -kInfinity;
    return best;
}

// Leaves the ranks of the best groups, and -inf in all others.
inline void keep_best_groups(float* ranks, const Routing& routing) {
    const int64_t size = routing.group_size();
    float judged[kMostExperts], members[kMostExperts];
    bool kept[kMostExperts] = {};
    for (int64_t group = 0; group < routing.groups; ++group) {
        for (int64_t i = 0; i < size; ++i) members[i] = ranks[group * size + i];
        judged[group] = 0.0f;
        for (int64_t i = 0; i < routing.group_members; ++i) {
            float best = -kInfinity;
            for (int64_t j = 0; j < size; ++j) best = members[j] > best ? members[j] : best;
            judged[group] += best;
            take_largest(members, size);
        }
    }
    for (int64_t i = 0; i < routing.top_groups; ++i) kept[take_largest(judged, routing.groups)] = true;
    for (int64_t i = 0; i < routing.count; ++i) ranks[i] = kept[i / size] ? ranks[i] : -kInfinity;
}

inline void choose(int32_t* chosen, float* weights, const Float32* scores, const Routing& routing) {
    float ranks[kMostExperts];
    for (int64_t i = 0; i < routing.count; ++i) ranks[i] = scores[i].value + (routing.bias ? routing.bias[i].value : 0.0f);
    if (routing.groups > routing.top_groups) keep_best_groups(ranks, routing);
    float total = 0.0f;
    for (int64_t k = 0; k < routing.top_k; ++k) {
        const int64_t expert = take_largest(ranks, routing.count);
        chosen[k] = static_cast<int32_t>(expert);
        weights[k] = scores[expert].value;
        total += weights[k];
    }
    for (int64_t k = 0; k < routing.top_k; ++k) {
        weights[k] = (routing.normalized ? weights[k] / (total + kLeastSum) : weights[k]) * routing.scale;
    }
}

// Each weight is that of a softmax over the logits that are not yet taken and no farther below the largest of them than `reach`
// times the larger magnitude (L. Liu et al., 2024, arXiv:2409.12136).
inline void mix(int32_t* chosen, float* weights, const Float32* logits, const Routing& routing) {
    float left[kMostExperts];
    for (int64_t i = 0; i < routing.count; ++i) left[i] = logits[i].value;
    for (int64_t k = 0; k < routing.top_k; ++k) {
        const int64_t expert = take_largest(left, routing.count);
        const float most = logits[expert].value;
        float total = 1.0f;
        for (int64_t i = 0; i < routing.count; ++i) {
            const float size = left[i] < 0.0f ? -left[i] : left[i], gap = most - left[i];
            const bool far = left[i] == -kInfinity || gap / (size > most ? size : most) > routing.reach;
            if (!far) total += exp(splat(-gap))[0];
        }
        chosen[k] = static_cast<int32_t>(expert);
        weights[k] = routing.scale / total;
    }
}

}  // namespace

// Returns -1 for an unknown dtype.
int64_t route(void* chosen, void* weights, const void* logits, const void* bias, int64_t rows, int64_t count,
              int64_t top_k, int64_t kind, int64_t groups, int64_t top_groups, int64_t group_members, int64_t normalized,
              float scale, float reach, int64_t dtype) {
    const Routing routing = {static_cast<const Float32*>(bias), count, top_k, kind, groups, top_groups, group_members,
                             normalized, scale, reach};
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        share(rows, kElementWork * rows * count * top_k, [=](int64_t row) {
            Float32 scores[kMostExperts];
            const T* from = static_cast<const T*>(logits) + row * count;
            store(scores + routing.padded() - kLanes, splat(-kInfinity), All{});
            for_each_vector(count, [&](int64_t i, auto lanes) { store(scores + i, load(from + i, lanes), lanes); });
            const auto ids = static_cast<int32_t*>(chosen) + row * top_k;
            const auto parts = static_cast<float*>(weights) + row * top_k;
            if (routing.scores == kSparseMixer) return mix(ids, parts, scores, routing);
            make_scores(scores, routing);
            choose(ids, parts, scores, routing);
        });
        return int64_t{0};
    });
}

}}  // namespace quire::QUIRE_ISA
