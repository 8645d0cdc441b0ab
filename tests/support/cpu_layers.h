// What tests of the CPU backends share: threads, who runs a layer here, schemes (schemes.h), both activation formats compared.
// Failures fail the running test case.
#ifndef MOED_TESTS_SUPPORT_CPU_LAYERS_H_
#define MOED_TESTS_SUPPORT_CPU_LAYERS_H_

#include <memory>
#include <vector>

#include "kernels/moe_kernel.h"
#include "tests/support/random_layer.h"
#include "tests/support/schemes.h"

namespace moed::testing {

// Two threads, for the whole program.
WorkerPool& Pool();

// The CPU backends that run `desc` on this machine, best first; cpu_generic always. Those whose instructions the processor lacks are
// reported as skipped.
std::vector<const Backend*> BackendsFor(const MoeDesc& desc);

// With Pool().
std::unique_ptr<PreparedMoe> Prepare(const Backend& backend, const MoeDesc& desc, const ExpertReader& experts);

// `moe` in the batched-experts format, combined by hand, gives what it gave in the standard format: `run` [rows, H], float32, to 1e-6.
// Not for layers with the weight on the input, whose rows a dispatcher multiplies first.
// `lane`: of layers on an accelerator.
void CompareBatched(const PreparedMoe& moe, const MoeDesc& desc, const RandomBatch& batch, const std::vector<float>& run,
                    Lane* lane = nullptr);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_CPU_LAYERS_H_
