// SPDX-License-Identifier: Apache-2.0
// A client for the calls of etcd's v3 API that the election and the journal use.
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
  std::shared_ptr<grpc::ChannelCredentials> credentials;  // null means plaintext
};

// Sends calls to the members of an etcd cluster. A call goes to the member that answered last and, if that one is not
// reachable, to the others in turn. So etcd may execute a call twice if an answer is lost, or after the caller has
// given up. Transactions must tolerate this; the callers' transactions compare revisions for that reason. Errors: those
// of etcd, with the member's endpoint; UNAVAILABLE or DEADLINE_EXCEEDED if no member answers. Thread-safe.
class EtcdClient {
 public:
  explicit EtcdClient(const EtcdOptions& options);

  absl::StatusOr<etcdserverpb::TxnResponse> Txn(const etcdserverpb::TxnRequest& request);
  absl::StatusOr<etcdserverpb::RangeResponse> Range(const etcdserverpb::RangeRequest& request);
  // Creates a lease and returns its id. Rounds `ttl` up to whole seconds.
  absl::StatusOr<int64_t> GrantLease(absl::Duration ttl);
  absl::Status RevokeLease(int64_t lease);
  // Renews a lease. Returns NOT_FOUND if it has expired.
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

// Returns the first key after all keys that begin with `prefix`: the `range_end` of a request for these keys.
std::string EndOfPrefix(std::string prefix);

// Conditions of a transaction: the key was created, or last modified, at `revision`. A missing key has revision 0.
etcdserverpb::Compare CreatedAt(const std::string& key, int64_t revision);
etcdserverpb::Compare ModifiedAt(const std::string& key, int64_t revision);

}  // namespace precondor::etcd
