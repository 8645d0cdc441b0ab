// The session socket: how a client of the same host hands the server memory that both use.
//
// A unix socket of type SOCK_SEQPACKET, whose path the Hello RPC tells. The client connects and sends one OpenRequest with one
// descriptor, that of a sealed memfd; the server answers with one OpenAnswer. The session lasts as long as the connection: when it
// closes, by whatever end of the client, the server unmaps the region as soon as the calls that use it are over. Nothing else is
// sent on the connection.
// Functions return 0 or an errno, or -1 with errno set as the system calls do.
#ifndef MOED_PROTO_RING_SESSION_H_
#define MOED_PROTO_RING_SESSION_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "proto/ring/layout.h"

namespace moed::ring {

// Names a session in an RPC. Nobody but the client who opened it learns it, and it cannot be guessed.
using SessionKey = std::array<uint8_t, 16>;

struct OpenRequest {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  uint64_t region_bytes = 0;  // size of the memfd, a multiple of 4096
  uint64_t ring_offset = 0;   // a multiple of kAlignment
  uint32_t ring_slots = 0;    // 1 to kMaxSlots, a power of two; 0: no ring
  uint32_t reserved = 0;
  char token[256] = {};       // what an RPC would carry as bearer token, where the server asks for one
};
static_assert(sizeof(OpenRequest) == 288);

struct OpenAnswer {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t code = 0;  // of grpc::StatusCode; 0: the session is open
  uint32_t reserved = 0;
  SessionKey key = {};
  SessionKey server_id = {};  // as Hello told it
  char message[464] = {};     // why not; ends with a zero byte
};
static_assert(sizeof(OpenAnswer) == 512);

// A memfd of `bytes`, sealed against shrinking and growing, with all of its pages there. Its descriptor.
int MakeRegion(size_t bytes);

// Whether `fd` is a memfd of exactly `bytes` whose size can never change. "" or what is wrong with it, in words.
std::string CheckRegion(int fd, size_t bytes);

// `fd` mapped for reading and writing; MAP_FAILED with errno set.
void* MapRegion(int fd, size_t bytes);

// Sends `bytes` as one packet, with the descriptor `fd` unless that is negative. 0 or an errno.
int SendPacket(int socket, const void* data, size_t bytes, int fd);

// Receives one packet of exactly `bytes`; `fd` becomes the descriptor that came with it, or -1. 0, ECONNRESET at the end of the
// connection, EPROTO for a packet of another size or with more than one descriptor, or another errno. No descriptor is lost.
int ReceivePacket(int socket, void* data, size_t bytes, int* fd);

}  // namespace moed::ring

#endif  // MOED_PROTO_RING_SESSION_H_
