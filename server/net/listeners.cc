// SPDX-License-Identifier: Apache-2.0
#include "server/net/listeners.h"

#include <cstring>
#include <grpcpp/server_posix.h>
#include <optional>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"
#include "server/net/acceptor.h"

namespace precondor {

absl::StatusOr<std::unique_ptr<Listeners>> Listeners::Bind(const std::vector<std::string>& addresses,
                                                           std::shared_ptr<grpc::ServerCredentials> credentials,
                                                           grpc::ServerBuilder& builder) {
  std::unique_ptr<Listeners> bound(new Listeners());
  for (const std::string& address : addresses) {
    if (const std::optional<std::string> path = UnixPath(address); path.has_value()) {
      PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<UnixListener> listener, UnixListener::Bind(*path));
      bound->unix_.push_back(std::move(listener));
      bound->addresses_.push_back(AbsoluteUnixAddress(address));
      continue;
    }
    PRECONDOR_ASSIGN_OR_RETURN(const TcpSocket socket, ListenTcp(address));
    bound->tcp_.push_back(std::make_unique<Acceptor>(socket.fd));
    bound->addresses_.push_back(absl::StrCat(address.substr(0, address.rfind(':')), ":", socket.port));
    if (bound->port_ == 0) bound->port_ = socket.port;
  }
  ConnectionWatch::SetLimits(builder);
  if (!bound->tcp_.empty()) {
    bound->to_server_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, std::move(credentials));
  }
  return bound;
}

void Listeners::Start(grpc::Server& server, Options options) {
  const auto failed = [failed = options.failed](int error) { failed(std::strerror(error)); };
  for (const auto& listener : unix_) {
    listener->Serve(
        [&server, options](int fd) {
          const absl::Status peer = options.check_unix_peer ? options.check_unix_peer(fd) : absl::OkStatus();
          if (peer.ok()) return grpc::AddInsecureChannelFromFd(&server, fd);
          options.refused(peer);
          close(fd);
        },
        failed);
  }
  refused_ = options.refused;
  watch_.WatchNewestServer();
  for (const auto& acceptor : tcp_) {
    acceptor->Start(
        [this](int fd) {
          if (const absl::Status peer = watch_.Add(fd, MonotonicNow()); !peer.ok()) {
            refused_(peer);
            close(fd);
            return;
          }
          grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
          connection.fd = fd;
          to_server_->HandleNewConnection(&connection);
        },
        failed);
  }
}

void Listeners::CheckConnections(absl::Time now) {
  for (const absl::Status& why : watch_.Check(now)) refused_(why);
}

void Listeners::Stop() {
  for (const auto& listener : unix_) listener->Stop();
  for (const auto& acceptor : tcp_) acceptor->Stop();
}

}  // namespace precondor
