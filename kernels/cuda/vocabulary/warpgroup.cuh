// What attention on Hopper is made of (sm_90a): products of a warpgroup that read shared memory by themselves, copies of
// boxes of a tensor by one thread, barriers in shared memory that both report to, and registers moved between warps.
//
// Operands in shared memory lie in PANELS: rows of 64 elements of bfloat16, 128 bytes, one after the other from a multiple
// of 1,024 bytes on, the eight pieces of 16 bytes of row r in the order piece ^ (r % 8). That is what copies with the
// 128-byte swizzle write, and what a product reads without conflicts of banks. A product names an operand by a descriptor
// of 64 bits (PTX ISA, "Matrix descriptor format"): address / 16 in bits 0..14, leading offset / 16 in bits 16..30, stride
// offset / 16 in bits 32..46, 1 for the 128-byte swizzle in bits 62..64. The stride offset is from eight rows of a panel to
// the next eight: 1,024 bytes. The hardware swizzles the address it computed, so that an operand may begin inside a row.
//
// | operand | elements along the sum | one step of 16 of them | leading offset |
// |---|---|---|---|
// | rows, as Q and K in Q K^T | along a panel's row | 32 bytes on; a new panel after four | not read |
// | columns, as V in P V | down a panel's rows | 16 rows, 2,048 bytes on | from one panel to the next |
//
// A product's result is D[64, N] in single precision: warp w of the four holds rows 16 w .. 16 w + 16, lane 4 g + t of it
// rows g and g + 8 and columns 2 t, 2 t + 1 of each eight, as with `multiply_add`; an operand in registers is like its `a`.
#pragma once

#include "device.cuh"

constexpr int WARPGROUP = 4 * WARP;
constexpr int PANEL_COLUMNS = 64, PANEL_ROW_BYTES = 128;

// ---- Barriers in shared memory ----------------------------------------------------------------------------------------

// A phase ends when `arrivals` threads have arrived and every byte that was announced in it has come; the next one then
// begins. A wait names a phase by the parity of its number; on a new barrier, phase -1 counts as ended.
__device__ __forceinline__ void initialize_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes new barriers known to copies; a barrier of the block has to follow.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and announces bytes that copies will bring.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for_phase(uint32_t barrier, int parity) {
    asm volatile("{\n"
                 ".reg .pred ended;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
                 "@ended bra done;\n"
                 "bra again;\n"
                 "done:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// ---- Turns of two warpgroups (numbered barriers 1..16) ----------------------------------------------------------------

// Waits until another warpgroup has passed this turn on.
__device__ __forceinline__ void wait_for_turn(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(2 * WARPGROUP) : "memory");
}

__device__ __forceinline__ void pass_turn(int number) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(2 * WARPGROUP) : "memory");
}

// ---- Registers --------------------------------------------------------------------------------------------------------

// A warpgroup gives registers back down to COUNT a thread, or waits until it can have as many; a multiple of 8.
template <int COUNT> __device__ __forceinline__ void give_registers_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- Copies -----------------------------------------------------------------------------------------------------------

// What the driver made of a tensor [batch, rows, columns] and a box of 64 columns: `TensorMap` in src/tensor_map.rs.
struct alignas(128) TensorMap {
    uint64_t opaque[16];
};

// One thread starts the copy of a box to a panel; rows behind the tensor become zero. All of the box's bytes report to the
// barrier.
__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap &map, int column, int row, int batch,
                                         uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3, %4}], [%5];" ::"r"(shared),
                 "l"(&map), "r"(column), "r"(row), "r"(batch), "r"(barrier)
                 : "memory");
}

// ---- Products ---------------------------------------------------------------------------------------------------------

// The descriptor of an operand at `address`; `panel_bytes` from one panel to the next, for columns.
__device__ __forceinline__ uint64_t operand_at(uint32_t address, uint32_t panel_bytes = 16) {
    constexpr uint64_t SWIZZLE_128 = uint64_t(1) << 62, STRIDE = uint64_t(8 * PANEL_ROW_BYTES / 16) << 32;
    return SWIZZLE_128 | STRIDE | uint64_t(panel_bytes / 16) << 16 | address / 16;
}

// Products may read and write registers that were written before this. All warps of the warpgroup call it, and all below.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The products since the last call are a group.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` of the latest groups run. What they wrote is then to pass through `settle`.
template <int PENDING> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of registers to before a wait.
template <int TILES> __device__ __forceinline__ void settle(float (&d)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
    }
}

// Keeps the assembler from moving what is computed before a wait to behind it, where nothing would run beside it: its
// scheduler sees nothing in a wait that holds arithmetic up, but moves little across a pause. `never` is false, which the
// compiler may not know.
__device__ __forceinline__ void compute_before_waiting(bool never) {
    if (never) asm volatile("nanosleep.u32 0;" ::: "memory");
}

#define OUT(I) "+f"(d[I][0]), "+f"(d[I][1]), "+f"(d[I][2]), "+f"(d[I][3])

// d = a b^T, or += where `add`: 64 rows of a, 128 rows of b, 16 elements of each.
__device__ __forceinline__ void multiply_rows_async(float (&d)[16][4], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, add, 1, 1, 0, 0;\n"
        "}"
        : OUT(0), OUT(1), OUT(2), OUT(3), OUT(4), OUT(5), OUT(6), OUT(7),
          OUT(8), OUT(9), OUT(10), OUT(11), OUT(12), OUT(13), OUT(14), OUT(15)
        : "l"(a), "l"(b), "r"(int(add)));
}

// The same for 64 rows of b; and for a in registers.
__device__ __forceinline__ void multiply_rows_async(float (&d)[8][4], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, 0, 0;\n"
        "}"
        : OUT(0), OUT(1), OUT(2), OUT(3), OUT(4), OUT(5), OUT(6), OUT(7)
        : "l"(a), "l"(b), "r"(int(add)));
}

__device__ __forceinline__ void multiply_rows_async(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n"
        "}"
        : OUT(0), OUT(1), OUT(2), OUT(3), OUT(4), OUT(5), OUT(6), OUT(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

// d += a b: 64 rows of a, 16 elements each, in registers; 16 rows of b, of 64 elements or of 128 in two panels.
__device__ __forceinline__ void multiply_columns_async(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : OUT(0), OUT(1), OUT(2), OUT(3), OUT(4), OUT(5), OUT(6), OUT(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void multiply_columns_async(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : OUT(0), OUT(1), OUT(2), OUT(3), OUT(4), OUT(5), OUT(6), OUT(7),
          OUT(8), OUT(9), OUT(10), OUT(11), OUT(12), OUT(13), OUT(14), OUT(15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef OUT
