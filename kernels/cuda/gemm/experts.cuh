// Which expert a block works for, found on the device: what routed.cu and routed_training.cu share.
//
// The places of expert e are offsets[e]..offsets[e + 1]. Each expert's places are cut into parts of their own, tiles of
// rows or pieces of a sum; a block asks for the n-th part of all. A grid is as large as the parts can become in the
// worst case, and blocks that find none left end at once.
#pragma once

#include "../vocabulary/device.cuh"

// The places of the experts. Without offsets every expert has `places` of them.
struct ExpertPlaces {
    const int *offsets;
    int experts, places;

    __device__ __forceinline__ int first(int expert) const {
        return offsets != nullptr ? offsets[expert] : expert * places;
    }
};

// A part: the `index`-th of the `count` of an expert, whose places are first..end; expert -1 where there is none.
struct ExpertPart {
    int expert, first, end, index, count;
};

// Finds the `part`-th part when an expert with n places has `count_of(n)`. Every warp looks for itself, 32 experts at a
// time.
template <class CountOf>
__device__ __forceinline__ ExpertPart find_expert_part(const ExpertPlaces &places, int part, CountOf count_of) {
    const int lane = threadIdx.x % WARP;
    int before = 0;
    for (int base = 0; base < places.experts; base += WARP) {
        const int expert = base + lane;
        const bool there = expert < places.experts;
        const int first = there ? places.first(expert) : 0, end = there ? places.first(expert + 1) : 0;
        const int count = there ? count_of(end - first) : 0;
        int through = count; // parts of the experts from `base` through this
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, through, distance);
            if (lane >= distance) through += other;
        }
        const unsigned reached = __ballot_sync(FULL_WARP, before + through > part);
        if (reached != 0) {
            const int owner = __ffs(reached) - 1;
            const int index = part - before - (through - count);
            return {base + owner, __shfl_sync(FULL_WARP, first, owner), __shfl_sync(FULL_WARP, end, owner),
                    __shfl_sync(FULL_WARP, index, owner), __shfl_sync(FULL_WARP, count, owner)};
        }
        before += __shfl_sync(FULL_WARP, through, WARP - 1);
    }
    return {-1, 0, 0, 0, 0};
}

// A tile of rows: places first..end of an expert, of which it takes the first ROWS; first == end where there is none.
struct ExpertRows {
    int expert, first, end;
};

template <int ROWS> __device__ __forceinline__ ExpertRows find_expert_rows(const ExpertPlaces &places, int tile) {
    const ExpertPart part = find_expert_part(places, tile, [](int count) { return (count + ROWS - 1) / ROWS; });
    return {part.expert, part.first + part.index * ROWS, part.end};
}

// How a sum over an expert's places is cut: into as few pieces of at most `most` places (a multiple of 64) as there can
// be, of equal length but for the last; an expert without places has an empty one.
__device__ __forceinline__ int piece_count(int places, int most) { return places > 0 ? (places - 1) / most + 1 : 1; }

// The places of the piece `part.index`. None begins behind the end: a length is at most `most`, and all pieces but one
// hold fewer than the expert's places at that length.
__device__ __forceinline__ ExpertRows piece_places(const ExpertPart &part) {
    const int places = part.end - part.first;
    const int length = ((places + part.count - 1) / part.count + 63) / 64 * 64;
    const int first = part.first + part.index * length;
    return {part.expert, first, min(first + length, part.end)};
}
