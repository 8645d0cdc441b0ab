#include "server/client_limits.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {

ClientShare::ClientShare(ClientShare&& other) noexcept
    : limits_(std::exchange(other.limits_, nullptr)), client_(std::move(other.client_)), rows_(std::exchange(other.rows_, 0)),
      bytes_(std::exchange(other.bytes_, 0)) {}

ClientShare& ClientShare::operator=(ClientShare&& other) noexcept {
  if (this == &other) return *this;
  GiveBack();
  limits_ = std::exchange(other.limits_, nullptr);
  client_ = std::move(other.client_);
  rows_ = std::exchange(other.rows_, 0);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

absl::Status ClientShare::TakeBytes(int64_t bytes) {
  if (limits_ == nullptr) return absl::OkStatus();
  absl::Status status = limits_->Take(client_, &ClientLimits::InFlight::bytes, bytes);
  if (status.ok()) bytes_ += bytes;
  return status;
}

absl::Status ClientShare::TakeRows(int64_t rows) {
  if (limits_ == nullptr) return absl::OkStatus();
  absl::Status status = limits_->Take(client_, &ClientLimits::InFlight::rows, rows);
  if (status.ok()) rows_ += rows;
  return status;
}

void ClientShare::GiveBack() {
  if (limits_ != nullptr) limits_->Give(client_, rows_, bytes_);
}

size_t ClientLimits::clients() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_flight_.size();
}

absl::Status ClientLimits::Take(const std::string& client, int64_t InFlight::*what, int64_t amount) {
  const bool rows = what == &InFlight::rows;
  const int64_t limit = rows ? max_rows_ : max_bytes_;
  if (limit == 0 || amount == 0) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = in_flight_.find(client);
  const int64_t held = found == in_flight_.end() ? 0 : found->second.*what;
  if (amount > limit - held) {
    return absl::ResourceExhaustedError(absl::StrCat("one client may have ", limit, rows ? " rows" : " bytes of requests",
                                                     " in flight: ", held, " are, ", amount, " more were asked for"));
  }
  in_flight_[client].*what += amount;
  return absl::OkStatus();
}

// Where one of the two has no limit its share was not counted, so what is there may be less than what is given.
void ClientLimits::Give(const std::string& client, int64_t rows, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = in_flight_.find(client);
  if (found == in_flight_.end()) return;
  if (max_rows_ > 0) found->second.rows -= rows;
  if (max_bytes_ > 0) found->second.bytes -= bytes;
  if (found->second.rows == 0 && found->second.bytes == 0) in_flight_.erase(found);
}

}  // namespace moed
