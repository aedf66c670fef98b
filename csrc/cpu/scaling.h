// What groups of k are scaled by, or shifted by, as it lies in panels: streams of one of a few types.

#pragma once

#include "kernels.h"
#include "lanes16.h"

namespace quire { namespace QUIRE_ISA { namespace {

constexpr int64_t kPanel = 16;

// Types of streams, by the codes that callers pass; the first three are those of DType. Blocks of 256 k are 16 float16 steps
// and then 16 int8 factors for each group; bytes are integer zero points.
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
            case kBlocks: return (groups >> log_block) * block_bytes();
            case kBytes: return groups * kPanel;
            default: return groups * kPanel * 2;
        }
    }
    // The stream from a panel on.
    Stream from(int64_t panel, int64_t groups) const {
        Stream later = *this;
        later.data += panel * panel_bytes(groups);
        return later;
    }
    // Of a group, as floats; of a panel that is so many bytes on.
    Lanes16 at(int64_t group, int64_t bytes) const {
        const uint8_t* panel = data + bytes;
        const int64_t first = group * kPanel;
        switch (type) {
            case kFloat32: return load16(reinterpret_cast<const Float32*>(panel) + first);
            case kBFloat16: return load16(reinterpret_cast<const BFloat16*>(panel) + first);
            case kFloat16: return load16(reinterpret_cast<const Float16*>(panel) + first);
            case kBlocks: {
                const uint8_t* block = panel + (group >> log_block) * block_bytes();
                const int64_t factor = group & ((int64_t{1} << log_block) - 1);
                return load16(reinterpret_cast<const Int8*>(block + kStepsBytes + factor * kPanel)) *
                       load16(reinterpret_cast<const Float16*>(block));
            }
            default: return to_floats(load16(panel + first));
        }
    }
    // The minimum of a group with that scale, where codes are counted from `zero`.
    Lanes16 minimum(int64_t group, int64_t bytes, Lanes16 scale, int32_t zero) const {
        if (type == kNoStream) return splat16(0.0f);
        if (type != kBytes) return at(group, bytes);
        return to_floats(load16(data + bytes + group * kPanel) - splat16(zero)) * scale;
    }
};

}}}  // namespace quire::QUIRE_ISA
