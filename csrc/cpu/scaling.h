// SPDX-License-Identifier: Apache-2.0
// What groups of k are scaled by, or shifted by, as it lies in panels: streams of one of a few types.

#pragma once

#include "kernels.h"
#include "lanes16.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kPanel = 16;

// Types of streams, by the codes that callers pass; the first three are those of DType. Blocks of 256 k, or less at the
// end, are 16 float16 steps and then 16 int8 factors for each group; bytes are integer zero points.
enum StreamType : int64_t { kNoStream = -1, kBlocks = 3, kBytes = 4 };

constexpr int64_t kBlockInputs = 256, kStepsBytes = 2 * kPanel;

// [group][16] of one panel after the other, with `groups` groups in each.
struct Stream {
    const uint8_t* data;
    int64_t type;
    int64_t log_block;  // groups of a block, as a power of two

    Stream(const void* data, int64_t type, int64_t group)
        : data(static_cast<const uint8_t*>(data)), type(type),
          log_block(type == kBlocks && group ? __builtin_ctzll(static_cast<uint64_t>(kBlockInputs / group)) : 0) {}

    int64_t block_bytes() const { return kStepsBytes + (kPanel << log_block); }

    int64_t panel_bytes(int64_t groups) const {
        switch (type) {
            case kNoStream: return 0;
            case kFloat32: return groups * kPanel * 4;
            case kBlocks: return ((groups + (int64_t{1} << log_block) - 1) >> log_block) * kStepsBytes + groups * kPanel;
            case kBytes: return groups * kPanel;
            default: return groups * kPanel * 2;
        }
    }
    Stream after(int64_t bytes) const {
        Stream later = *this;
        later.data += bytes;
        return later;
    }
    // The stream from a panel on.
    Stream from(int64_t panel, int64_t groups) const { return after(panel * panel_bytes(groups)); }
    // Calls body(f) with what makes floats of a group.
    template <class Body>
    auto with_groups(Body body) const {
        switch (type) {
            case kFloat32: return body([this](int64_t group) { return load16(lanes<Float32>(group)); });
            case kBFloat16: return body([this](int64_t group) { return load16(lanes<BFloat16>(group)); });
            case kFloat16: return body([this](int64_t group) { return load16(lanes<Float16>(group)); });
            case kBlocks: return body([this](int64_t group) {
                const uint8_t* block = data + (group >> log_block) * block_bytes();
                const int64_t factor = group & ((int64_t{1} << log_block) - 1);
                return load16(reinterpret_cast<const Int8*>(block + kStepsBytes + factor * kPanel)) *
                       load16(reinterpret_cast<const Float16*>(block));
            });
            default: return body([this](int64_t group) { return to_floats(load16(data + group * kPanel)); });
        }
    }
    // Of a group, as floats.
    Lanes16 at(int64_t group) const {
        return with_groups([&](auto floats_of) { return floats_of(group); });
    }
    // Of `count` groups from `first` on, as floats [count][16].
    void widen(Float32* out, int64_t first, int64_t count) const {
        with_groups([&](auto floats_of) {
            for (int64_t i = 0; i < count; ++i) store16(out + i * kPanel, floats_of(first + i));
        });
    }
    // The same of minimums, of groups with those scales, where codes are counted from `zero`.
    void widen_minimums(Float32* out, const Float32* scales, int64_t first, int64_t count, int32_t zero) const {
        if (type != kNoStream && type != kBytes) return widen(out, first, count);
        const bool exist = type == kBytes;
        for (int64_t i = 0; i < count; ++i) {
            const Lanes16 scale = load16(scales + i * kPanel);
            store16(out + i * kPanel, exist ? to_floats(load16(data + (first + i) * kPanel) - splat16(zero)) * scale
                                            : splat16(0.0f));
        }
    }

private:
    template <class T>
    const T* lanes(int64_t group) const { return reinterpret_cast<const T*>(data) + group * kPanel; }
};

}}}  // namespace quire::QUIRE_ISA
