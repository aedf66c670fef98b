// SPDX-License-Identifier: Apache-2.0
// Stands in for instructions that the processor lacks: AVX-VNNI's vpdpbusd, and AMX with 8-bit integers and bfloat16.
//
// Preloaded into a process, it answers for the instruction sets named in QUIRE_EMULATE, and executes in plain C++ what the
// processor refuses, one trap for each instruction. It knows the forms that compilers emit, and ends the process at any other.
// The encodings and operations are those of Intel's "Architecture Instruction Set Extensions Programming Reference".

#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

namespace {

struct Tile { uint8_t bytes[16][64]; };

// The tiles of a thread, and their shapes as they were loaded.
struct Tiles {
    uint8_t shapes[64];
    Tile tile[8];

    int rows(int i) const { return shapes[48 + i]; }
    int row_bytes(int i) const { return shapes[16 + 2 * i] | shapes[17 + 2 * i] << 8; }
};
thread_local Tiles tiles;

[[noreturn]] void fail(const char* what, const uint8_t* at) {
    char line[160];
    const int size = std::snprintf(line, sizeof line, "emulator: %s: %02x %02x %02x %02x %02x %02x\n", what, at[0], at[1], at[2],
                                   at[3], at[4], at[5]);
    if (write(2, line, static_cast<size_t>(size)) < 0) _exit(97);
    _exit(98);
}

// The registers of the thread that was stopped.
struct Registers {
    ucontext_t* context;

    greg_t& integer(int i) const {
        static constexpr int places[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                         REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
        return context->uc_mcontext.gregs[places[i]];
    }
    greg_t& next() const { return context->uc_mcontext.gregs[REG_RIP]; }
    uint8_t* state() const { return reinterpret_cast<uint8_t*>(context->uc_mcontext.fpregs); }

    // A ymm register: its low half stands with the old registers, its high one behind the header of the extended state.
    void load(int i, uint8_t* out) const {
        std::memcpy(out, state() + 160 + 16 * i, 16);
        std::memcpy(out + 16, state() + 576 + 16 * i, 16);
    }
    void store(int i, const uint8_t* from) const {
        std::memcpy(state() + 160 + 16 * i, from, 16);
        std::memcpy(state() + 576 + 16 * i, from + 16, 16);
        state()[512] |= 6;  // both halves are in use: the kernel restores what this says
    }
};

// A VEX instruction of the map 0F38: prefix (0 none, 1 = 66, 2 = F3, 3 = F2), opcode, and operands.
struct Instruction {
    int prefix, opcode, reg, vvvv, rm, length;
    bool wide, in_memory;
    const uint8_t* address;
    int64_t stride;  // of a tile in memory
};

Instruction decode(const uint8_t* at, const Registers& registers) {
    if (at[0] != 0xc4 || (at[1] & 31) != 2) fail("not an instruction that it knows", at);
    const int r = ~at[1] >> 7 & 1, x = ~at[1] >> 6 & 1, b = ~at[1] >> 5 & 1, modrm = at[4];
    Instruction in = {};
    in.prefix = at[2] & 3, in.wide = at[2] >> 2 & 1, in.vvvv = ~at[2] >> 3 & 15, in.opcode = at[3];
    in.reg = (modrm >> 3 & 7) | r << 3, in.rm = (modrm & 7) | b << 3, in.length = 5;
    const int mode = modrm >> 6;
    in.in_memory = mode != 3;
    if (!in.in_memory) return in;
    int64_t address = 0;
    bool relative = false, displaced = mode == 2;
    if ((modrm & 7) == 4) {
        const int sib = at[in.length++], index = (sib >> 3 & 7) | x << 3, base = (sib & 7) | b << 3;
        if (index != 4) in.stride = registers.integer(index) * (int64_t{1} << (sib >> 6));
        if ((sib & 7) == 5 && mode == 0) displaced = true;
        else address = registers.integer(base);
    } else if ((modrm & 7) == 5 && mode == 0) {
        relative = displaced = true;
    } else {
        address = registers.integer(in.rm);
    }
    if (mode == 1) address += static_cast<int8_t>(at[in.length++]);
    if (displaced) {
        int32_t by;
        std::memcpy(&by, at + in.length, sizeof by);
        address += by, in.length += 4;
    }
    if (relative) address += reinterpret_cast<int64_t>(at) + in.length;
    in.address = reinterpret_cast<const uint8_t*>(address);
    return in;
}

// U is the type of the left bytes.
template <class U = uint8_t>
int32_t dot(const uint8_t* u, const uint8_t* s) {
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += int32_t{static_cast<U>(u[i])} * static_cast<int8_t>(s[i]);
    return sum;
}

void multiply_bytes(const Instruction& in, const Registers& registers) {
    uint8_t sums[32], left[32], right[32];
    registers.load(in.reg, sums);
    registers.load(in.vvvv, left);
    if (in.in_memory) std::memcpy(right, in.address + in.stride, in.wide ? 32 : 16);
    else registers.load(in.rm, right);
    for (int i = 0; i < (in.wide ? 8 : 4); ++i) {
        int32_t sum;
        std::memcpy(&sum, sums + 4 * i, 4);
        sum += dot(left + 4 * i, right + 4 * i);
        std::memcpy(sums + 4 * i, &sum, 4);
    }
    if (!in.wide) std::memset(sums + 16, 0, 16);
    registers.store(in.reg, sums);
}

float widened(const uint8_t* bf16) {
    uint32_t bits = static_cast<uint32_t>(bf16[0] | bf16[1] << 8) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Numbers below the normal ones count as 0, and none are made: of sums, that is, for products are not rounded.
__attribute__((noinline)) void multiply_floats(const uint8_t* a, const uint8_t* b, int quads, uint8_t* place) {
    float sum, first = 0.0f, second = 0.0f;
    std::memcpy(&sum, place, 4);
    for (int k = 0; k < quads; ++k, a += 4, b += sizeof(Tile::bytes[0])) {
        first = std::fma(widened(a), widened(b), first);
        second = std::fma(widened(a + 2), widened(b + 2), second);
    }
    sum += first + second;
    std::memcpy(place, &sum, 4);
}

void multiply_tiles(const Instruction& in, const uint8_t* at) {
    Tile& out = tiles.tile[in.reg];
    const Tile &a = tiles.tile[in.rm], &b = tiles.tile[in.vvvv];
    const int quads = tiles.row_bytes(in.rm) / 4;
    if (quads != tiles.rows(in.vvvv) || tiles.rows(in.reg) != tiles.rows(in.rm) ||
        tiles.row_bytes(in.reg) != tiles.row_bytes(in.vvvv) || !tiles.rows(in.reg) || !quads) {
        fail("tiles that do not fit each other", at);
    }
    for (int m = 0; m < tiles.rows(in.reg); ++m) {
        for (int n = 0; n < tiles.row_bytes(in.reg) / 4; ++n) {
            uint8_t* place = out.bytes[m] + 4 * n;
            if (in.opcode == 0x5e) {
                int32_t sum;
                std::memcpy(&sum, place, 4);
                for (int k = 0; k < quads; ++k) sum += dot<int8_t>(b.bytes[k] + 4 * n, a.bytes[m] + 4 * k);
                std::memcpy(place, &sum, 4);
                continue;
            }
            multiply_floats(a.bytes[m], b.bytes[0] + 4 * n, quads, place);
        }
    }
}

void move_tile(const Instruction& in, const uint8_t* at) {
    if (in.reg > 7 || !tiles.rows(in.reg)) fail("a tile without a shape", at);
    Tile& tile = tiles.tile[in.reg];
    if (in.prefix == 3) tile = {};
    for (int row = 0; row < tiles.rows(in.reg); ++row) {
        uint8_t* memory = const_cast<uint8_t*>(in.address) + row * in.stride;
        const size_t bytes = static_cast<size_t>(tiles.row_bytes(in.reg));
        if (in.prefix == 3) std::memcpy(tile.bytes[row], memory, bytes);
        else std::memcpy(memory, tile.bytes[row], bytes);
    }
}

void set_tiles(const Instruction& in, const uint8_t* at) {
    if (in.prefix == 3) {
        tiles.tile[in.reg] = {};
    } else if (in.in_memory) {
        const uint8_t* shapes = in.address + in.stride;
        if (shapes[0] != 1 || shapes[1] != 0) fail("shapes of another palette", at);
        tiles = {};
        std::memcpy(tiles.shapes, shapes, 64);
    } else {
        tiles = {};
    }
}

void step(int, siginfo_t*, void* context) {
    const Registers registers = {static_cast<ucontext_t*>(context)};
    const uint8_t* at = reinterpret_cast<const uint8_t*>(registers.next());
    const Instruction in = decode(at, registers);
    if (in.opcode == 0x50 && in.prefix == 1) multiply_bytes(in, registers);
    else if (in.opcode == 0x5e && in.prefix == 3) multiply_tiles(in, at);  // tdpbssd
    else if (in.opcode == 0x5c && in.prefix == 2) {  // tdpbf16ps
        const unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | 0x8040);
        multiply_tiles(in, at);
        _mm_setcsr(mode);
    }
    else if (in.opcode == 0x4b && in.in_memory) move_tile(in, at);
    else if (in.opcode == 0x49) set_tiles(in, at);
    else fail("not an instruction that it knows", at);
    registers.next() += in.length;
}

__attribute__((constructor)) void begin() {
    struct sigaction action = {};
    action.sa_sigaction = step;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, nullptr);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t quire_cpu_emulates(const char* isa) {
    const char* names = std::getenv("QUIRE_EMULATE");
    for (const char* name = names; name && *name; name = std::strchr(name, ',') ? std::strchr(name, ',') + 1 : nullptr) {
        const size_t length = std::strcspn(name, ",");
        if (std::strlen(isa) == length && std::strncmp(name, isa, length) == 0) return 1;
    }
    return 0;
}
