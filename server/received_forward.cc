#include "server/received_forward.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <thread>

#include "server/wire.h"

namespace moed {
namespace {

using google::protobuf::io::CodedOutputStream;

constexpr size_t kMostOfPiece = size_t{32} << 10;  // bytes a thread copies at a time
constexpr size_t kUsualSlice = size_t{64} << 10;   // of the transport's, where messages are large

// The slices of `bytes`, where they lie; none is empty. Nothing when they cannot be read.
std::vector<std::string_view> SlicesOf(grpc::ByteBuffer* bytes) {
  std::vector<std::string_view> slices;
  slices.reserve(bytes->Length() / kUsualSlice + 8);
  grpc::ProtoBufferReader reader(bytes);
  const void* data = nullptr;
  for (int size = 0; reader.Next(&data, &size);) {
    if (size > 0) slices.emplace_back(static_cast<const char*>(data), static_cast<size_t>(size));
  }
  return slices;
}

// Calls piece(std::string_view) for the bytes [begin, end) of what the slices hold, in order; no piece is empty.
template <typename Piece>
void ForPieces(const std::vector<std::string_view>& slices, size_t begin, size_t end, const Piece& piece) {
  size_t at = 0;  // of the slice's first byte
  for (const std::string_view slice : slices) {
    if (at >= end) return;
    const size_t from = std::max(begin, at), to = std::min(end, at + slice.size());
    if (from < to) piece(slice.substr(from - at, to - from));
    at += slice.size();
  }
}

// Reads pieces of memory one after the other. They must stay where they are.
class PieceStream final : public google::protobuf::io::ZeroCopyInputStream {
 public:
  // Room for so many more.
  void Reserve(size_t pieces) { pieces_.reserve(pieces_.size() + pieces); }
  void Add(std::string_view piece) { pieces_.push_back(piece); }
  void Add(const std::vector<std::string_view>& slices, size_t begin, size_t end) {
    ForPieces(slices, begin, end, [this](std::string_view piece) { pieces_.push_back(piece); });
  }

  bool Next(const void** data, int* size) override {
    if (next_ == pieces_.size()) return false;
    const std::string_view left = pieces_[next_].substr(offset_);
    *data = left.data();
    *size = static_cast<int>(left.size());
    ++next_;
    offset_ = 0;
    count_ += *size;
    return true;
  }

  // Only after a Next, at most what that gave.
  void BackUp(int count) override {
    if (count == 0) return;
    --next_;
    offset_ = pieces_[next_].size() - static_cast<size_t>(count);
    count_ -= count;
  }

  bool Skip(int count) override {
    const void* data = nullptr;
    for (int size = 0; count > 0; count -= size) {
      if (!Next(&data, &size)) return false;
      if (size <= count) continue;
      BackUp(size - count);
      return true;
    }
    return count == 0;
  }

  int64_t ByteCount() const override { return count_; }

 private:
  std::vector<std::string_view> pieces_;
  size_t next_ = 0;    // piece that Next gives
  size_t offset_ = 0;  // and from where in it
  int64_t count_ = 0;
};

// The message with the bytes of data left out, and with the length that hidden then has, which is written to `length`.
void AddWithoutData(const std::vector<std::string_view>& slices, size_t size, const HiddenPlace& hidden, uint8_t (&length)[5],
                    PieceStream* stream) {
  const size_t data_end = hidden.data_at + hidden.bytes;
  const size_t left = hidden.end - hidden.begin - (data_end - hidden.field_at);
  const uint8_t* length_end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(left), length);
  stream->Add(slices, 0, hidden.length_at);
  stream->Add({reinterpret_cast<const char*>(length), static_cast<size_t>(length_end - length)});
  stream->Add(slices, hidden.begin, hidden.field_at);
  stream->Add(slices, data_end, size);
}

}  // namespace

absl::Status ReceivedForward::Parse(grpc::ByteBuffer* bytes) {
  const size_t size = bytes->Length();
  if (size == 0) return absl::OkStatus();  // a message without fields
  const google::protobuf::Descriptor& descriptor = *message_.GetDescriptor();
  bytes_.Swap(bytes);
  slices_ = SlicesOf(&bytes_);
  if (slices_.empty()) return CannotParse(descriptor, size);
  std::optional<HiddenPlace> hidden;
  {
    PieceStream all;
    all.Reserve(slices_.size());
    all.Add(slices_, 0, size);
    if (absl::Status status = CheckBytes(&all, size, descriptor, &hidden); !status.ok()) return status;
  }
  PieceStream stream;
  uint8_t length[5];  // read by the stream
  if (hidden) {
    AddWithoutData(slices_, size, *hidden, length, &stream);
  } else {
    stream.Add(slices_, 0, size);
  }
  if (!message_.ParseFromZeroCopyStream(&stream)) return CannotParse(descriptor, size);
  if (hidden) {
    hidden_at_ = hidden->data_at, hidden_bytes_ = hidden->bytes;
  } else {
    slices_.clear();
    bytes_.Clear();
  }
  return absl::OkStatus();
}

void ReceivedForward::PlaceHidden(std::byte* to) {
  pieces_.reserve(slices_.size() + hidden_bytes_ / kMostOfPiece);
  ForPieces(slices_, hidden_at_, hidden_at_ + hidden_bytes_, [&](std::string_view slice) {
    for (; !slice.empty(); slice.remove_prefix(pieces_.back().bytes)) {
      pieces_.push_back({to, slice.data(), std::min(slice.size(), kMostOfPiece)});
      to += pieces_.back().bytes;
    }
  });
  copied_ = std::make_unique<std::atomic<bool>[]>(pieces_.size());
}

// False when every piece was begun.
bool ReceivedForward::CopyPiece() {
  const size_t at = next_.fetch_add(1, std::memory_order_relaxed);
  if (at >= pieces_.size()) return false;
  std::memcpy(pieces_[at].to, pieces_[at].from, pieces_[at].bytes);
  copied_[at].store(true, std::memory_order_release);
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void ReceivedForward::TakePart() {
  while (CopyPiece()) {
  }
}

size_t ReceivedForward::WaitPast(size_t bytes) {
  for (;;) {
    while (prefix_pieces_ < pieces_.size() && copied_[prefix_pieces_].load(std::memory_order_acquire)) {
      prefix_bytes_ += pieces_[prefix_pieces_++].bytes;
    }
    if (prefix_bytes_ > bytes || prefix_pieces_ == pieces_.size()) return prefix_bytes_;
    // Without a piece to copy, other threads are at those that are missing. They have a processor, or soon will.
    if (!CopyPiece()) std::this_thread::yield();
  }
}

void ReceivedForward::LetGo() {
  while (done_.load(std::memory_order_acquire) < pieces_.size()) std::this_thread::yield();
  slices_ = {};
  bytes_.Clear();
}

}  // namespace moed
