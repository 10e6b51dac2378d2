// SPDX-License-Identifier: Apache-2.0
// A TCP relay on 127.0.0.1 that a test puts between a client and a server, to cut connections in the middle.
#pragma once

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"

namespace precondor {

// Thread-safe.
class Relay {
 public:
  Relay();
  ~Relay();
  // "127.0.0.1:port", open from the start; connections wait until Target is called.
  std::string address() const;
  void Target(int port);
  // Cuts every connection once each time that many more bytes have passed, in either direction.
  void CutAfter(std::vector<int64_t> bytes);
  // Cuts every connection now.
  void Cut();
  // While held, what comes goes no further, as from a process that hangs.
  void Hold(bool hold);
  // Waits until something has come and gone no further; false after 20 seconds.
  bool WaitUntilHeld();
  int cuts() const;

 private:
  void AcceptLoop();
  void Pump(int from, int to);
  void WaitWhileHeld();
  // False when the bytes just passed were the last before a cut.
  bool Pass(int64_t bytes);

  int listener_ = -1;
  int port_ = 0;
  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool hold_ ABSL_GUARDED_BY(mu_) = false;
  int held_ ABSL_GUARDED_BY(mu_) = 0;  // pumps that wait
  int target_ ABSL_GUARDED_BY(mu_) = 0;
  int cuts_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t passed_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<int64_t> places_ ABSL_GUARDED_BY(mu_);
  std::vector<int> sockets_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> pumps_ ABSL_GUARDED_BY(mu_);
  std::thread acceptor_;
};

}  // namespace precondor
