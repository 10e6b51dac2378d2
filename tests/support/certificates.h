// SPDX-License-Identifier: Apache-2.0
// Authorities and certificates that a test makes for itself.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"

namespace precondor {

struct Pem {
  std::string certificate;
  std::string key;
};

// The content of a certificate. `names` as OpenSSL writes alternative names: "DNS:a.test,IP:127.0.0.1,URI:b:c"; may be
// empty.
struct CertificateWish {
  std::string common_name;
  std::string names;
  absl::Duration valid_from = -absl::Hours(1);  // from now
  absl::Duration valid_until = absl::Hours(1);
};

// Threads: one.
class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name);
  ~TestAuthority();
  const std::string& pem() const { return pem_; }
  // A new key and its certificate; each has another serial number.
  Pem Issue(const CertificateWish& wish);

 private:
  struct Parts;
  const std::unique_ptr<Parts> parts_;
  std::string pem_;
};

// Whole or not at all, as rotation has to be.
void WriteAtOnce(const std::string& path, const std::string& text);

}  // namespace precondor
