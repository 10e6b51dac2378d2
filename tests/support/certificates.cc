// SPDX-License-Identifier: Apache-2.0
#include "tests/support/certificates.h"

#include <cstdio>
#include <fstream>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include "kernels/base/check.h"

namespace precondor {
namespace {

void AddExtension(X509* certificate, X509* issuer, int id, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, id, value.c_str());
  PRECONDOR_CHECK(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1);
  X509_EXTENSION_free(extension);
}

X509* NewCertificate(const CertificateWish& wish, EVP_PKEY* key, long serial) {
  X509* const certificate = X509_new();
  X509_set_version(certificate, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial);
  X509_gmtime_adj(X509_getm_notBefore(certificate), absl::ToInt64Seconds(wish.valid_from));
  X509_gmtime_adj(X509_getm_notAfter(certificate), absl::ToInt64Seconds(wish.valid_until));
  X509_set_pubkey(certificate, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                             reinterpret_cast<const uint8_t*>(wish.common_name.c_str()), -1, -1, 0);
  return certificate;
}

template <typename Write>
std::string ToPem(const Write& write) {
  BIO* const bio = BIO_new(BIO_s_mem());
  PRECONDOR_CHECK(write(bio) == 1);
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, static_cast<size_t>(size));
  BIO_free(bio);
  return text;
}

std::string PemOf(X509* certificate) {
  return ToPem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); });
}

// Authorities of one test have others.
long RandomSerial() {
  uint32_t number = 0;
  PRECONDOR_CHECK(RAND_bytes(reinterpret_cast<uint8_t*>(&number), sizeof(number)) == 1);
  return long{number} + 1;
}

}  // namespace

struct TestAuthority::Parts {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = nullptr;
  long serial = RandomSerial();
};

TestAuthority::TestAuthority(const std::string& name) : parts_(std::make_unique<Parts>()) {
  parts_->certificate = NewCertificate({.common_name = name, .names = ""}, parts_->key, parts_->serial);
  X509_set_issuer_name(parts_->certificate, X509_get_subject_name(parts_->certificate));
  AddExtension(parts_->certificate, parts_->certificate, NID_basic_constraints, "critical,CA:TRUE");
  PRECONDOR_CHECK(X509_sign(parts_->certificate, parts_->key, EVP_sha256()) > 0);
  pem_ = PemOf(parts_->certificate);
}

TestAuthority::~TestAuthority() {
  X509_free(parts_->certificate);
  EVP_PKEY_free(parts_->key);
}

Pem TestAuthority::Issue(const CertificateWish& wish) {
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  X509* const certificate = NewCertificate(wish, key, ++parts_->serial);
  X509_set_issuer_name(certificate, X509_get_subject_name(parts_->certificate));
  if (!wish.names.empty()) AddExtension(certificate, parts_->certificate, NID_subject_alt_name, wish.names);
  PRECONDOR_CHECK(X509_sign(certificate, parts_->key, EVP_sha256()) > 0);
  Pem pem;
  pem.certificate = PemOf(certificate);
  pem.key = ToPem([&](BIO* bio) { return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr); });
  X509_free(certificate);
  EVP_PKEY_free(key);
  return pem;
}

void WriteAtOnce(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new") << text;
  PRECONDOR_CHECK(std::rename((path + ".new").c_str(), path.c_str()) == 0);
}

}  // namespace precondor
