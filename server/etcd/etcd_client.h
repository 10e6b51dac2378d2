// SPDX-License-Identifier: Apache-2.0
// The calls of etcd's v3 API that the election and the journal need.
#pragma once

#include <cstdint>
#include <functional>
#include <grpcpp/security/credentials.h>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "server/etcd/etcd.grpc.pb.h"

namespace precondor::etcd {

struct EtcdOptions {
  std::vector<std::string> endpoints;  // host:port of the cluster's members, at least one
  absl::Duration request_timeout = absl::Seconds(3);
  std::shared_ptr<grpc::ChannelCredentials> credentials;  // null: none
};

// Thread-safe. A call goes to the member that answered last; when that one is not to be reached, to the others in turn.
// Then a call whose answer was lost may be carried out twice, or after the caller has given up: callers' transactions
// compare revisions, so that this does no harm.
// Errors: those of etcd, naming the member; Unavailable or DeadlineExceeded when none answers.
class EtcdClient {
 public:
  explicit EtcdClient(const EtcdOptions& options);

  absl::StatusOr<etcdserverpb::TxnResponse> Txn(const etcdserverpb::TxnRequest& request);
  absl::StatusOr<etcdserverpb::RangeResponse> Range(const etcdserverpb::RangeRequest& request);
  // Id of a new lease.
  absl::StatusOr<int64_t> GrantLease(absl::Duration ttl);
  absl::Status RevokeLease(int64_t lease);
  // NotFound: the lease has expired.
  absl::Status KeepLeaseAlive(int64_t lease);

 private:
  struct Member {
    std::string endpoint;
    std::unique_ptr<etcdserverpb::KV::Stub> kv;
    std::unique_ptr<etcdserverpb::Lease::Stub> lease;
  };
  absl::Status Call(absl::string_view what,
                    const std::function<grpc::Status(const Member&, grpc::ClientContext&)>& call);

  const absl::Duration request_timeout_;
  std::vector<Member> members_;  // const after construction
  Mutex mu_;
  size_t preferred_ ABSL_GUARDED_BY(mu_) = 0;
};

// The first key behind all that begin with `prefix`.
std::string EndOfPrefix(std::string prefix);

// Conditions of a transaction. A missing key has revision 0.
etcdserverpb::Compare CreatedAt(const std::string& key, int64_t revision);
etcdserverpb::Compare ModifiedAt(const std::string& key, int64_t revision);

}  // namespace precondor::etcd
