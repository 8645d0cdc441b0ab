// The token sort: which rows each expert has, and the tiles that they make. Arguments and contract are SortArgs in call_block.h.
//
// Three shapes, chosen by the launch's capacities alone. Few slots: a block in which every slot compares itself with all others,
// with no loop over experts. More: one block that counts, scans and places. Many: a grid counts its chunks of slots, and a second
// one, where every block sums all chunks' counts for itself, places the rows; so nothing has to be cleared between calls, and no
// block waits for another.
//
// The first launch of a call's sort is a plain one: it may follow anything.
//
// Loops that mostly run once are not unrolled: a cold call pays for the instructions that it fetches.
//
// Nothing depends on the order in which threads run but the ranks within an expert, which atomics hand out: a row's result does not
// depend on its rank.
#include <cuda_runtime.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_after-inl.cuh"

namespace moed::cuda {
namespace {

constexpr int kSortThreads = 1024;
constexpr int kWarp = 32;
static_assert(kSortThreads == kWarp * kWarp);  // one warp scans the sums of all

// Slots, or rows where all go to expert 0.
__device__ int SlotsOf(const SortArgs& a) { return a.ids != nullptr ? a.rows * a.top_k : a.rows; }

__device__ void PlaceRow(const SortArgs& a, int at, int source, int slot, int expert, int rank) {
  a.source[at] = source;
  a.slot[at] = slot;
  a.expert[at] = expert;
  a.rank[at] = rank;
}

// Few slots. The sorted row of a slot is the number of slots with lower experts, and of earlier ones with its own.
struct FewRank {
  int at = 0;     // sorted row
  int rank = 0;
  int count = 0;  // rows of the expert
};

// `ids`: [kFewSlots] in shared memory, -1 behind the call's slots.
__device__ FewRank RankAmong(const int32_t* ids, int slots, int i, int id) {
  FewRank found;
  for (int j = 0; j < slots; j += 4) {
    const int4 four = *reinterpret_cast<const int4*>(ids + j);
    const int others[] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const bool equal = others[k] == id;
      found.at += others[k] >= 0 && others[k] < id;
      found.rank += equal && j + k < i;
      found.count += equal;
    }
  }
  found.at += found.rank;
  return found;
}

// The counters of the product for few rows; all threads of one block.
__device__ void ClearFinished(const SortArgs& a) {
  if (a.finished == nullptr) return;
  for (int i = threadIdx.x; i < kFewRowsCounters; i += blockDim.x) a.finished[i] = 0;
}

__global__ void __launch_bounds__(kFewSlots) SortFew(const SortArgs* args) {
  constexpr int kWords = kFewSlots / kWarp;
  __shared__ __align__(16) int32_t ids[kFewSlots];
  __shared__ uint32_t heads[kWords];  // bit r: sorted row r is the first of a tile
  const SortArgs a = *args;
  BeginAfterEarlier();
  const int i = threadIdx.x, slots = SlotsOf(a);
  const int id = i >= slots ? -1 : a.ids != nullptr ? a.ids[i] : 0;
  ids[i] = id;
  if (i < kWords) heads[i] = 0;
  if (i < 2) a.absmax[i] = 0;
  ClearFinished(a);
  const int rows = __syncthreads_count(id >= 0);
  const FewRank found = RankAmong(ids, slots, i, id);
  const bool head = id >= 0 && found.rank % a.tile_rows == 0;
  if (head) atomicOr(&heads[found.at / kWarp], 1u << found.at % kWarp);
  __syncthreads();
  int tile = 0, tiles = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int bits = min(max(found.at - w * kWarp, 0), kWarp);  // of this word, before the row's own
    tile += __popc(heads[w] & (bits == kWarp ? ~0u : (1u << bits) - 1));
    tiles += __popc(heads[w]);
  }
  if (head) a.tiles[tile] = {id, found.at, min(a.tile_rows, found.count - found.rank), 0};
  if (i == 0) a.totals[0] = rows, a.totals[1] = tiles;
  if (i < slots) a.position[i] = id >= 0 ? found.at : -1;
  if (id >= 0) PlaceRow(a, found.at, a.ids != nullptr ? i / a.top_k : i, i, id, found.rank);
}

// The slots [begin, end) of a block.
struct Chunk {
  int begin, end;
};

__device__ Chunk ChunkOf(int slots) {
  const int size = (slots + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int begin = min(slots, static_cast<int>(blockIdx.x) * size);
  return {begin, min(slots, begin + size)};
}

// Adds the chunk's rows of each expert to `count`, and leaves in `position` how many there were before each slot's own. Slots of a
// warp that share an expert count as one, so that an expert that has them all costs no more than others.
__device__ void CountSlots(const SortArgs& a, Chunk chunk, int32_t* count) {
  const int lane = threadIdx.x % kWarp;
  const auto load = [&](int slot) { return slot < chunk.end ? a.ids[slot] : -1; };
  int next = load(chunk.begin + threadIdx.x);
#pragma unroll 1
  for (int first = chunk.begin; first < chunk.end; first += kSortThreads) {
    const int slot = first + threadIdx.x, id = next;
    next = load(slot + kSortThreads);
    const unsigned same = __match_any_sync(~0u, id);
    const int leader = __ffs(same) - 1;
    int before = 0;
    if (id >= 0 && lane == leader) before = atomicAdd(&count[id], __popc(same));
    before = __shfl_sync(~0u, before, leader);
    if (slot < chunk.end) a.position[slot] = before + __popc(same & ((1u << lane) - 1));
  }
}

// Inclusive sums over the threads of a warp.
__device__ uint64_t WarpScan(uint64_t sum) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum;
}

// Exclusive sums over the kSortThreads threads of a block; `total` gets the sum of all.
__device__ uint64_t BlockScan(uint64_t value, uint64_t* total) {
  __shared__ uint64_t warps[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint64_t sum = WarpScan(value);
  __syncthreads();  // of an earlier scan
  if (lane == kWarp - 1) warps[warp] = sum;
  __syncthreads();
  const uint64_t through = WarpScan(warps[lane]);
  const uint64_t before = __shfl_sync(~0u, through, max(warp - 1, 0));
  *total = __shfl_sync(~0u, through, kWarp - 1);
  return (warp == 0 ? 0 : before) + sum - value;
}

// Each lane's `tiles` tiles of the `rows` sorted rows from `begin` on of expert `e`, from a.tiles[tile] on. A lane writes its first
// ones itself, and the warp those of experts with more.
__device__ void WriteTiles(const SortArgs& a, int e, int begin, int rows, int tile, int tiles) {
  constexpr int kOwn = 2;
  const auto write = [&a](int expert, int row, int count, int to, int i) {
    a.tiles[to + i] = {expert, row + i * a.tile_rows, min(a.tile_rows, count - i * a.tile_rows), 0};
  };
  for (int i = 0; i < min(tiles, kOwn); ++i) write(e, begin, rows, tile, i);
  for (unsigned left = __ballot_sync(~0u, tiles > kOwn); left != 0; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int its_e = __shfl_sync(~0u, e, from), its_begin = __shfl_sync(~0u, begin, from), its_rows = __shfl_sync(~0u, rows, from);
    const int its_tile = __shfl_sync(~0u, tile, from), its_tiles = __shfl_sync(~0u, tiles, from);
    for (int i = kOwn + threadIdx.x % kWarp; i < its_tiles; i += kWarp) write(its_e, its_begin, its_rows, its_tile, i);
  }
}

// Begins of the experts' sorted rows replace their counts in `first`, and the tiles are listed: by each block those of its share of
// the experts.
__device__ void ListTiles(const SortArgs& a, int32_t* first) {
  uint64_t passed = 0, passed_rests = 0;  // of the experts before: rows, and tiles in the upper half; tiles of the other list
#pragma unroll 1
  for (int base = 0; base < a.experts; base += kSortThreads) {
    const int e = base + threadIdx.x;
    const int rows = e < a.experts ? first[e] : 0;
    const int beyond = rows % a.tile_rows, rest = beyond <= a.rest_rows ? beyond : 0;  // of the other list
    const int tiles = (rows - rest + a.tile_rows - 1) / a.tile_rows;
    uint64_t total;
    const uint64_t before = passed + BlockScan(static_cast<uint64_t>(tiles) << 32 | static_cast<uint32_t>(rows), &total);
    const int begin = static_cast<int>(before & 0xFFFFFFFFu), tile = static_cast<int>(before >> 32);
    if (e < a.experts) first[e] = begin;
    const bool own = e % gridDim.x == blockIdx.x;
    WriteTiles(a, e, begin, rows, tile, own ? tiles : 0);
    passed += total;
    if (a.rest_rows == 0) continue;
    const int place = static_cast<int>(passed_rests + BlockScan(rest > 0, &total));
    if (own && rest > 0) a.tiles[a.rest_first + place] = {e, begin + rows - rest, rest, 0};
    passed_rests += total;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    a.totals[0] = static_cast<int32_t>(passed & 0xFFFFFFFFu);
    a.totals[1] = static_cast<int32_t>(passed >> 32);
    if (a.rest_rows > 0) a.totals[2] = static_cast<int32_t>(passed_rests);
  }
  __syncthreads();
}

// Sums what CountHistograms left in a.count: the rows of each expert go to `first`, those in the blocks before this one to
// `before`. Both hold zeros. Threads of one expert share the blocks where there are fewer experts than threads.
__device__ void SumHistograms(const SortArgs& a, int32_t* first, int32_t* before) {
  const int width = min(a.experts, kSortThreads), teams = kSortThreads / width;
  const int team = threadIdx.x / width, blocks = gridDim.x, own = blockIdx.x;
  if (team >= teams) return;
  for (int e = threadIdx.x % width; e < a.experts; e += width) {
    int all = 0, earlier = 0;
#pragma unroll 8
    for (int b = team; b < blocks; b += teams) {
      const int rows = a.count[b * a.experts + e];
      all += rows;
      earlier += b < own ? rows : 0;
    }
    if (all > 0) atomicAdd(&first[e], all);
    if (earlier > 0) atomicAdd(&before[e], earlier);
  }
}

__device__ void PlaceSlots(const SortArgs& a, Chunk chunk, const int32_t* first, const int32_t* before) {
#pragma unroll 1
  for (int slot = chunk.begin + threadIdx.x; slot < chunk.end; slot += kSortThreads) {
    const int id = a.ids[slot];
    if (id < 0) {
      a.position[slot] = -1;
      continue;
    }
    const int rank = before[id] + a.position[slot], at = first[id] + rank;
    a.position[slot] = at;
    PlaceRow(a, at, slot / a.top_k, slot, id, rank);
  }
}

// All rows of the chunk go to expert 0.
__device__ void PlaceAll(const SortArgs& a, Chunk chunk) {
#pragma unroll 1
  for (int row = chunk.begin + threadIdx.x; row < chunk.end; row += kSortThreads) {
    a.position[row] = row;
    PlaceRow(a, row, row, row, 0, row);
  }
}

// Batched experts: warps share the experts, and blocks the rows of each.
__device__ void PlaceCounted(const SortArgs& a, const int32_t* first) {
  const int step = kWarp * gridDim.x;
  for (int e = threadIdx.x / kWarp; e < a.experts; e += kSortThreads / kWarp) {
    const int rows = a.counts[e], begin = first[e];
    for (int r = kWarp * blockIdx.x + threadIdx.x % kWarp; r < rows; r += step) {
      PlaceRow(a, begin + r, e * a.max_m + r, e * a.max_m + r, e, r);
    }
  }
}

// [blocks][experts] rows of each chunk go to a.count. Needs ids, and shared memory of one count an expert.
__global__ void __launch_bounds__(kSortThreads) CountHistograms(const SortArgs* args) {
  extern __shared__ int32_t count[];
  const SortArgs a = *args;
  BeginAfterEarlier();
#pragma unroll 1
  for (int e = threadIdx.x; e < a.experts; e += kSortThreads) count[e] = 0;
  __syncthreads();
  CountSlots(a, ChunkOf(SlotsOf(a)), count);
  __syncthreads();
  int32_t* out = a.count + static_cast<int>(blockIdx.x) * a.experts;
#pragma unroll 1
  for (int e = threadIdx.x; e < a.experts; e += kSortThreads) out[e] = count[e];
}

// One block, or a grid after CountHistograms of the same grid where there are ids. Two counts an expert lie in shared memory, or
// in a.count, where it must be one block. Which one is known to the compiler: atomics on either alone are several times as fast.
template <bool kInShared>
__global__ void __launch_bounds__(kSortThreads) Sort(const SortArgs* args) {
  extern __shared__ int32_t counts[];
  const SortArgs a = *args;
  BeginAfterEarlier();
  int32_t* const first = kInShared ? counts : a.count;  // rows of each expert, then its first sorted row
  int32_t* const before = first + a.experts;            // its rows in the blocks before this one
#pragma unroll 1
  for (int e = threadIdx.x; e < a.experts; e += kSortThreads) {
    first[e] = a.counts != nullptr ? a.counts[e] : a.ids == nullptr && e == 0 ? a.rows : 0;
    before[e] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x < 2) a.absmax[threadIdx.x] = 0;
  if (blockIdx.x == 0) ClearFinished(a);
  __syncthreads();
  const Chunk chunk = ChunkOf(SlotsOf(a));
  if (a.ids != nullptr && gridDim.x == 1) CountSlots(a, chunk, first);
  if (a.ids != nullptr && gridDim.x > 1) SumHistograms(a, first, before);
  __syncthreads();
  ListTiles(a, first);
  if (a.counts != nullptr) {
    PlaceCounted(a, first);
  } else if (a.ids == nullptr) {
    PlaceAll(a, chunk);
  } else {
    PlaceSlots(a, chunk, first, before);
  }
}

}  // namespace

cudaError_t LaunchSort(const SortLaunch& launch, const SortArgs* args, cudaStream_t stream) {
  if (launch.by != SortBy::kCounts && launch.slots <= kFewSlots) {
    SortFew<<<1, kFewSlots, 0, stream>>>(args);
    return cudaGetLastError();
  }
  if (launch.experts > kSharedExperts) {
    Sort<false><<<1, kSortThreads, 0, stream>>>(args);
    return cudaGetLastError();
  }
  const size_t shared = launch.experts * sizeof(int32_t);
  if (launch.blocks > 1 && launch.by == SortBy::kIds) {
    CountHistograms<<<launch.blocks, kSortThreads, shared, stream>>>(args);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    return LaunchAfter(Sort<true>, launch.blocks, kSortThreads, 2 * shared, stream, args);
  }
  Sort<true><<<launch.blocks, kSortThreads, 2 * shared, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moed::cuda
