// SPDX-License-Identifier: Apache-2.0
// Files with which a client authenticates servers and itself; docs/operate/security.md says how to make them.
#pragma once

#include <string>

namespace precondor {

// Paths of PEM files, and of a token. The client reads each file again when it changes: a new certificate applies to
// the next connection, a new token to the next call. The files apply to host:port addresses; a unix: address needs
// none.
struct ClientSecurity {
  // Certificates of the authorities that sign the servers' certificates. If empty, connections are in plaintext and all
  // other fields must be empty. A server's certificate must name the host that the client dials.
  std::string tls_ca = {};
  // This client's certificate chain (its own certificate and the intermediate ones) and its private key. Set both or
  // neither.
  std::string tls_cert = {};
  std::string tls_key = {};
  std::string token_file = {};  // one line: the bearer token that each call carries
};

}  // namespace precondor
