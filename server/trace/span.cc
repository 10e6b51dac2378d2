// SPDX-License-Identifier: Apache-2.0
#include "server/trace/span.h"

#include "absl/strings/str_cat.h"
#include <nlohmann/json.hpp>

namespace precondor::trace {
namespace {

using Json = nlohmann::json;

constexpr int kStatusError = 2;

Json EncodeValue(const std::string& value) { return {{"stringValue", value}}; }
// Protobuf's JSON writes 64-bit integers as strings.
Json EncodeValue(int64_t value) { return {{"intValue", absl::StrCat(value)}}; }
Json EncodeValue(double value) { return {{"doubleValue", value}}; }

Json EncodeAttributes(const std::vector<Attribute>& attributes) {
  Json list = Json::array();
  for (const Attribute& attribute : attributes) {
    Json value = std::visit([](const auto& held) { return EncodeValue(held); }, attribute.value);
    list.push_back({{"key", attribute.name}, {"value", std::move(value)}});
  }
  return list;
}

Json EncodeSpan(const Span& span, absl::Duration wall_offset) {
  const auto unix_nanos = [wall_offset](absl::Time at) { return absl::StrCat(absl::ToUnixNanos(at + wall_offset)); };
  Json json = {{"traceId", span.context.trace_id},
               {"spanId", span.context.span_id},
               {"name", span.name},
               {"kind", static_cast<int>(span.kind)},
               {"startTimeUnixNano", unix_nanos(span.start)},
               {"endTimeUnixNano", unix_nanos(span.end)},
               {"attributes", EncodeAttributes(span.attributes)}};
  if (!span.parent_span_id.empty()) json["parentSpanId"] = span.parent_span_id;
  for (const Event& event : span.events) {
    json["events"].push_back({{"timeUnixNano", unix_nanos(event.at)}, {"name", event.name}});
  }
  if (span.link.has_value()) {
    json["links"].push_back({{"traceId", span.link->trace_id}, {"spanId", span.link->span_id}});
  }
  if (!span.status.ok()) {
    json["status"] = {{"code", kStatusError}, {"message", std::string(span.status.message())}};
  }
  return json;
}

}  // namespace

std::string EncodeOtlp(const Resource& resource, const std::vector<Span>& spans, absl::Duration wall_offset) {
  Json encoded = Json::array();
  for (const Span& span : spans) encoded.push_back(EncodeSpan(span, wall_offset));
  const Json from = EncodeAttributes({{"service.name", std::string("precondor-server")},
                                      {"service.version", resource.version},
                                      {"service.instance.id", resource.instance},
                                      {"precondor.role", resource.role}});
  const Json scope = {{"scope", {{"name", "precondor"}, {"version", resource.version}}}, {"spans", std::move(encoded)}};
  const Json request = {
      {"resourceSpans", Json::array({{{"resource", {{"attributes", from}}}, {"scopeSpans", Json::array({scope})}}})}};
  // Replaces invalid UTF-8: users choose the names of sessions.
  return request.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace precondor::trace
