// SPDX-License-Identifier: Apache-2.0
// Checks files of certificates and keys before gRPC gets them: it would not name the file that is wrong.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace precondor::wire {

// Returns the text of a file of at most 1 MiB. Returns NotFound, with the option that names it, the path and the
// reason, if it cannot be read or is larger.
absl::StatusOr<std::string> ReadCredentialFile(absl::string_view option, const std::string& path);

// Checks that the file has certificates of authorities in PEM form, and nothing else.
absl::Status CheckAuthorities(absl::string_view option, const std::string& path);

// Returns the certificate chain in the file `cert` if it and the key can be read and belong together. The options are
// tls_cert and tls_key.
absl::StatusOr<std::string> ReadCertificate(const std::string& cert, const std::string& key);

// Returns the end of validity of the certificate of `chain` that expires first. Precondition: `chain` comes from
// ReadCertificate.
absl::Time ExpiryOf(const std::string& chain);

}  // namespace precondor::wire
