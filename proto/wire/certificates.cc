// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/certificates.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor::wire {
namespace {

constexpr size_t kMostBytes = 1 << 20;

struct Deleter {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Owned = std::unique_ptr<T, Deleter>;

Owned<BIO> Reader(const std::string& text) {
  return Owned<BIO>(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Removes the errors of its lifetime from OpenSSL's queue of this thread, where the program's own TLS would find them.
struct ErrorScope {
  ErrorScope() { ERR_set_mark(); }
  ~ErrorScope() { ERR_pop_to_mark(); }
  ErrorScope(const ErrorScope&) = delete;
  ErrorScope& operator=(const ErrorScope&) = delete;
};

// A password callback that gives none; by default OpenSSL asks for the passphrase of an encrypted key on the terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

}  // namespace

absl::StatusOr<std::string> ReadCredentialFile(absl::string_view option, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text;
  for (char part[4096]; file.is_open() && !file.eof() && !file.bad() && text.size() <= kMostBytes;) {
    file.read(part, sizeof(part));  // an istream iterator would throw on an unreadable file
    text.append(part, static_cast<size_t>(file.gcount()));
  }
  if (!file.is_open() || file.bad()) {
    return absl::NotFoundError(absl::StrCat(option, ": cannot read ", path, ": ", std::strerror(errno)));
  }
  if (text.size() <= kMostBytes) return text;
  return absl::NotFoundError(absl::StrCat(option, " ", path, ": expected at most ", kMostBytes, " bytes, got more"));
}

absl::Status CheckAuthorities(absl::string_view option, const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::string text, ReadCredentialFile(option, path));
  const Owned<BIO> reader = Reader(text);
  int found = 0;
  const ErrorScope errors;
  while (Owned<X509>(PEM_read_bio_X509(reader.get(), nullptr, NoPassphrase, nullptr)) != nullptr) ++found;
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  if (found > 0 && at_end) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(option, " ", path, ": expected certificates in PEM form alone, got ",
                   found == 0 ? std::string("something else") : absl::StrCat(found, " and something else")));
}

absl::StatusOr<std::string> ReadCertificate(const std::string& cert, const std::string& key) {
  const ErrorScope errors;
  PRECONDOR_ASSIGN_OR_RETURN(std::string chain, ReadCredentialFile("tls_cert", cert));
  PRECONDOR_ASSIGN_OR_RETURN(const std::string secret, ReadCredentialFile("tls_key", key));
  const Owned<X509> certificate(PEM_read_bio_X509(Reader(chain).get(), nullptr, NoPassphrase, nullptr));
  if (certificate == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("tls_cert ", cert, ": expected a certificate in PEM form"));
  }
  const Owned<EVP_PKEY> private_key(PEM_read_bio_PrivateKey(Reader(secret).get(), nullptr, NoPassphrase, nullptr));
  if (private_key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("tls_key ", key, ": expected a private key in PEM form without a passphrase"));
  }
  if (X509_check_private_key(certificate.get(), private_key.get()) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("tls_key ", key, ": expected the key of the certificate ", cert, ", got another one"));
  }
  return chain;
}

absl::Time ExpiryOf(const std::string& chain) {
  const ErrorScope errors;
  const Owned<BIO> reader = Reader(chain);
  absl::Time first = absl::InfiniteFuture();
  for (;;) {
    const Owned<X509> certificate(PEM_read_bio_X509(reader.get(), nullptr, NoPassphrase, nullptr));
    if (certificate == nullptr) return first;
    tm end = {};
    if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &end) == 1) {
      first = std::min(first, absl::FromTM(end, absl::UTCTimeZone()));
    }
  }
}

}  // namespace precondor::wire
