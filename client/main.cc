// moectl: the command-line client of moed. Parses the command line, runs one command, and turns its outcome into the exit
// code: 0 ok, 1 a check failed, 2 usage or set-up.
#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "client/moectl.h"

namespace {

constexpr char kExamples[] = R"(Examples:
  moectl status
  moectl --server unix:/run/moed.sock explain --json
  moectl smoke --tokens 8
  moectl forward --layer 0 --input golden.safetensors --hidden 0.x --expect 0.y_block --max-rel 0.01
  moectl bench --layer 0 --tokens 1,64 --concurrency 4 --seconds 5
  moectl health && echo ready
  moectl doctor
  moectl replay recordings --bound 0.01
  moectl --server unix:/run/moed/admin.sock swap big /models/big-v2
  moectl --server moe.example:50061 --tls-ca ca.pem --token-file token status

Exit code: 0 ok, 1 a check failed, 2 usage or set-up.)";

// gRPC and protobuf would write their own lines to stderr, whose first line belongs to our error.
void SilenceLibraries() {
  google::protobuf::SetLogHandler(nullptr);
  gpr_set_log_function([](gpr_log_func_args*) {});
}

// Length of the UTF-8 character at `at` of `text`, without overlong forms, surrogates and what is beyond U+10FFFF.
// 0 when there is none.
size_t CharacterLength(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  for (size_t i = 1; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
  }
  const bool out_of_range = (first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
                            (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F);
  return out_of_range ? 0 : length;
}

std::string CheckUtf8(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = CharacterLength(text, at);
    if (length == 0) return "wanted text in UTF-8, got other bytes from byte " + std::to_string(at) + " on";
    at += length;
  }
  return "";
}

void AddGlobals(CLI::App& app, moed::client::Globals* globals) {
  app.add_option("--server", globals->server, "HOST:PORT or unix:PATH")->envname("MOED_SERVER")->capture_default_str();
  app.add_option("--model", globals->model, "name of the model, where the server has several")
      ->check(CLI::Validator(CheckUtf8, ""));
  app.add_flag("--json", globals->json, "print one JSON document on stdout and nothing else there");
  app.add_option("--timeout", globals->timeout_s, "deadline of a call in seconds (default 60, smoke 600)")
      ->check(moed::client::Between(0.001, 86400));
  moed::client::ClientOptions* connection = &globals->connection;
  app.add_option("--tls-ca", connection->tls_ca, "PEM certificates that may have signed the server's: the connection is TLS");
  app.add_option("--tls-cert", connection->tls_cert, "PEM certificate to show to a server that asks for one");
  app.add_option("--tls-key", connection->tls_key, "PEM private key of --tls-cert");
  app.add_option("--token-file", connection->token_file, "its first line that is no comment is sent as the caller's token")
      ->envname("MOED_TOKEN_FILE");
  app.set_version_flag("--version", std::string("moectl ") + moed::client::kVersion);
}

// The error as a text. CLI11 does not say which word it took for a command that it does not know.
std::string ErrorText(const CLI::App& app, const CLI::ParseError& error) {
  if (!app.get_subcommands().empty() || error.get_exit_code() != static_cast<int>(CLI::ExitCodes::RequiredError)) {
    return error.what();
  }
  std::string text = "wanted a command:";
  for (const CLI::App* command : app.get_subcommands(nullptr)) text += " " + command->get_name();
  const std::vector<std::string> rest = app.remaining();
  return text + "; got " + (rest.empty() ? "none" : "\"" + rest.front() + "\"");
}

int RunMain(int argc, char** argv) {
  CLI::App app("moectl: command-line client of moed, the server of MoE layers", "moectl");
  app.footer(kExamples);
  app.require_subcommand(1);
  moed::client::Globals globals;
  AddGlobals(app, &globals);
  moed::client::Run run;
  moed::client::AddStatus(app, globals, &run);
  moed::client::AddExplain(app, globals, &run);
  moed::client::AddHealth(app, globals, &run);
  moed::client::AddSmoke(app, globals, &run);
  moed::client::AddForward(app, globals, &run);
  moed::client::AddBench(app, globals, &run);
  moed::client::AddDoctor(app, globals, &run);
  moed::client::AddReplay(app, globals, &run);
  moed::client::AddChanges(app, globals, &run);
  for (CLI::App* command : app.get_subcommands(nullptr)) {
    command->fallthrough();
    command->footer(command->get_footer() +
                    "\n\nEvery command also takes --server, --model, --json, --timeout, the TLS files and the token: see "
                    "`moectl --help`.");
  }

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // --help and --version arrive here too, with code 0.
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fprintf(stderr, "moectl: %s\n  `moectl --help` and `moectl COMMAND --help` show usage and examples\n",
                 ErrorText(app, error).c_str());
    return moed::client::kExitSetUp;
  }
  return run();
}

}  // namespace

int main(int argc, char** argv) {
  moed::client::TuneAllocator();
  SilenceLibraries();
  try {
    return RunMain(argc, argv);
  } catch (const std::exception& error) {  // out of memory, say
    std::fprintf(stderr, "moectl: %s\n", error.what());
    return moed::client::kExitSetUp;
  }
}
