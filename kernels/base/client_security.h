// SPDX-License-Identifier: Apache-2.0
// The files with which a client knows its servers and proves who it is; docs/security.md says how to make them.
#pragma once

#include <string>

namespace precondor {

// Paths of files in PEM form, and of a token. All are read again when they change: a new certificate counts for the
// next connection, a new token for the next call. They apply to host:port addresses; a unix: address needs none.
struct ClientSecurity {
  // Certificates of the authorities that sign servers' certificates. Empty: connections are in plaintext, and all other
  // fields are empty. The certificate of a server has to name the host that is dialled.
  std::string tls_ca = {};
  // This client's certificate, with those between it and its authority, and its key. Both or neither.
  std::string tls_cert = {};
  std::string tls_key = {};
  std::string token_file = {};  // one line: the bearer token that goes with every call
};

}  // namespace precondor
