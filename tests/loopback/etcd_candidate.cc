// SPDX-License-Identifier: Apache-2.0
// A candidate for etcd_test, in a process of its own so that it can be stopped and killed.
// Usage: etcd_candidate ENDPOINT IDENTITY TTL_SECONDS
// Says "leads <records>" when elected, and then answers lines: "append SESSION STEP" and "check" with the status' code.
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "server/etcd/etcd_client.h"
#include "server/etcd/etcd_election.h"
#include "server/etcd/etcd_log.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  precondor::etcd::EtcdClient client({.endpoints = {argv[1]}, .credentials = nullptr});
  precondor::etcd::ElectionOptions options;
  options.identity = argv[2];
  options.lease_ttl = absl::Seconds(std::atoi(argv[3]));
  options.retry = absl::Milliseconds(50);
  precondor::etcd::EtcdElection election(client, options, nullptr);
  if (const absl::Status status = election.Campaign(); !status.ok()) {
    std::cerr << status << "\n";
    return 1;
  }
  auto opened = precondor::etcd::EtcdLog::Open(client, election);
  if (!opened.ok()) {
    std::cerr << opened.status() << "\n";
    return 1;
  }
  std::cout << "leads " << opened->records.size() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    uint64_t session = 0, step = 0;
    words >> command >> session >> step;
    absl::Status status = election.Check();
    if (command == "append") {
      precondor::LeaseRecord record;
      record.session_id = session;
      record.lease.durable_through = step;
      status = opened->journal->Append(record);
    }
    std::cout << absl::StatusCodeToString(status.code()) << std::endl;
  }
  return 0;
}
