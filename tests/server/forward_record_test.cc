// The end of a forward as its observer is told: once, with the reason where it was dropped.
#include "server/forward_record.h"

#include <catch2/catch.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace moed {
namespace {

using std::chrono::steady_clock;

struct Layer : LayerObserver {
  void Finished(const FinishedForward& forward) override { finished.push_back(forward); }
  void Ran(const FinishedRun&) override {}
  std::vector<FinishedForward> finished;
};

struct Server : CallObserver {
  std::shared_ptr<LayerObserver> OfLayer(const ObservedLayer& asked) override {
    asked_for.push_back(asked);
    return layer;
  }
  void Finished(const FinishedForward& forward) override { unknown.push_back(forward); }
  std::shared_ptr<Layer> layer = std::make_shared<Layer>();
  std::vector<ObservedLayer> asked_for;
  std::vector<FinishedForward> unknown;
};

CheckedForward Checked(const std::shared_ptr<LayerObserver>& observer) {
  CheckedForward checked;
  checked.model = "m";
  checked.call.layer = 3;
  checked.call.hidden = {nullptr, DType::kF32, 5, 8};
  checked.observer = observer;
  return checked;
}

}  // namespace

TEST_CASE("A call that is answered is told to its layer, once, with rows, bytes and times") {
  Server server;
  ForwardRecord record;
  record.Begin(&server, Transport::kRpc, 200);
  record.SetCall(Checked(server.layer));
  ForwardAnswer answer;
  answer.receive_us = 1;
  answer.queue_us = 2;
  answer.info.compute_us = 3;
  record.SetTimes(answer, 4);
  record.SetSent(170);
  record.End(absl::OkStatus(), steady_clock::now() - std::chrono::milliseconds(5));
  record.End(absl::InternalError("again"), steady_clock::now());
  REQUIRE(server.layer->finished.size() == 1);
  CHECK(server.unknown.empty());
  const FinishedForward& told = server.layer->finished[0];
  CHECK(told.transport == Transport::kRpc);
  CHECK(told.code == absl::StatusCode::kOk);
  CHECK(told.drop == Drop::kNone);
  CHECK(told.rows == 5);
  CHECK(told.received_bytes == 200);
  CHECK(told.sent_bytes == 170);
  CHECK(std::vector<int64_t>{told.receive_us, told.queue_us, told.compute_us, told.send_us} == std::vector<int64_t>{1, 2, 3, 4});
  CHECK(told.total_us >= 5000);
}

TEST_CASE("The reason of a drop is the one that was said first, else what the code says") {
  const auto drop_of = [](const absl::Status& status, Drop said) {
    Server server;
    ForwardRecord record;
    record.Begin(&server, Transport::kRing, 0);
    record.SetCall(Checked(server.layer));
    record.SetDrop(said);
    record.SetDrop(Drop::kClient);
    record.End(status, steady_clock::now());
    return server.layer->finished.at(0).drop;
  };
  CHECK(drop_of(absl::ResourceExhaustedError(""), Drop::kQueue) == Drop::kQueue);
  CHECK(drop_of(absl::ResourceExhaustedError(""), Drop::kBytes) == Drop::kBytes);
  CHECK(drop_of(absl::OkStatus(), Drop::kQueue) == Drop::kNone);
  const auto drop_of_code = [](const absl::Status& status) {
    Server server;
    ForwardRecord record;
    record.Begin(&server, Transport::kRpc, 0);
    record.End(status, steady_clock::now());
    return server.unknown.at(0).drop;
  };
  CHECK(drop_of_code(absl::ResourceExhaustedError("")) == Drop::kMemory);
  CHECK(drop_of_code(absl::DeadlineExceededError("")) == Drop::kExpired);
  CHECK(drop_of_code(absl::CancelledError("")) == Drop::kCancelled);
  CHECK(drop_of_code(absl::InvalidArgumentError("")) == Drop::kNone);
}

TEST_CASE("Tensors in shared memory make a message a session's, and their bytes count") {
  Server server;
  ForwardRecord record;
  record.Begin(&server, Transport::kRpc, 100);
  CheckedForward checked = Checked(server.layer);
  checked.hidden_session.emplace();
  record.SetCall(checked);
  record.End(absl::OkStatus(), steady_clock::now());
  REQUIRE(server.layer->finished.size() == 1);
  CHECK(server.layer->finished[0].transport == Transport::kSession);
  CHECK(server.layer->finished[0].received_bytes == 100 + 5 * 8 * 4);
}

TEST_CASE("A call that is not valid belongs to the layer that it names, where there is one") {
  ModelStatus model;
  model.name = "m";
  model.first_expert = 2;
  model.end_expert = 6;
  model.layers.push_back({.layer = 3});
  ModelTable models({model});
  Server server;
  models.Observe(&server);
  REQUIRE(server.asked_for.size() == 1);
  CHECK(server.asked_for[0].model == "m");
  CHECK(server.asked_for[0].layer == 3);
  CHECK(server.asked_for[0].first_expert == 2);
  CHECK(server.asked_for[0].end_expert == 6);
  const auto end = [&](const std::string& name, int layer) {
    ForwardRecord record;
    record.Begin(&server, Transport::kRpc, 0);
    record.SetAsked(models, name, layer);
    record.End(absl::InvalidArgumentError(""), steady_clock::now());
  };
  end("m", 3);
  end("", 3);
  CHECK(server.layer->finished.size() == 2);
  end("m", 4);
  end("other", 3);
  CHECK(server.layer->finished.size() == 2);
  CHECK(server.unknown.size() == 2);
}

TEST_CASE("Where nobody observes, and where nothing was begun, an end is no matter") {
  ForwardRecord record;
  record.End(absl::OkStatus(), steady_clock::now());
  record.Begin(nullptr, Transport::kRpc, 0);
  record.End(absl::OkStatus(), steady_clock::now());
  CHECK(PrintableId(std::string("a\nb\x7f", 4)) == "a?b?");
}

}  // namespace moed
