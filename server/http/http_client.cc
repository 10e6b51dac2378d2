// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_client.h"

#include <curl/curl.h>
#include <memory>

#include "absl/strings/str_cat.h"

namespace precondor::metrics {

absl::Status PostJson(const std::string& address, absl::string_view path, const std::string& body,
                      absl::Duration timeout) {
  const std::string url = absl::StrCat("http://", address, path);
  const auto failed = [&](absl::string_view why) { return absl::UnavailableError(absl::StrCat(url, ": ", why)); };
  const std::unique_ptr<CURL, decltype(&curl_easy_cleanup)> request(curl_easy_init(), &curl_easy_cleanup);
  const std::unique_ptr<curl_slist, decltype(&curl_slist_free_all)> headers(
      curl_slist_append(nullptr, "Content-Type: application/json"), &curl_slist_free_all);
  if (request == nullptr || headers == nullptr) return failed("curl does not start");
  const auto ignore = +[](char*, size_t size, size_t count, void*) { return size * count; };
  curl_easy_setopt(request.get(), CURLOPT_URL, url.c_str());
  curl_easy_setopt(request.get(), CURLOPT_PROTOCOLS_STR, "http");
  curl_easy_setopt(request.get(), CURLOPT_PROXY, "");  // none, also where http_proxy is set
  curl_easy_setopt(request.get(), CURLOPT_HTTPHEADER, headers.get());
  curl_easy_setopt(request.get(), CURLOPT_POSTFIELDS, body.data());
  curl_easy_setopt(request.get(), CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
  curl_easy_setopt(request.get(), CURLOPT_WRITEFUNCTION, ignore);
  curl_easy_setopt(request.get(), CURLOPT_TIMEOUT_MS, static_cast<long>(absl::ToInt64Milliseconds(timeout)));
  curl_easy_setopt(request.get(), CURLOPT_NOSIGNAL, 1L);
  if (const CURLcode code = curl_easy_perform(request.get()); code != CURLE_OK) return failed(curl_easy_strerror(code));
  long status = 0;
  curl_easy_getinfo(request.get(), CURLINFO_RESPONSE_CODE, &status);
  if (status < 200 || status >= 300) return failed(absl::StrCat("answered with ", status));
  return absl::OkStatus();
}

}  // namespace precondor::metrics
