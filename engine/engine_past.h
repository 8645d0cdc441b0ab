// What an engine remembers of a model's former weights.
#ifndef MOED_ENGINE_ENGINE_PAST_H_
#define MOED_ENGINE_ENGINE_PAST_H_

#include <cstdint>
#include <memory>
#include <string>

#include "engine/engine.h"

namespace moed {

struct Engine::Past {
  uint64_t generation = 0;      // the largest that a model of this name had
  std::string path;             // of the weights before the last swap; empty: there was none
  std::shared_ptr<Model> kept;  // these, when they are still in memory
};

}  // namespace moed

#endif  // MOED_ENGINE_ENGINE_PAST_H_
