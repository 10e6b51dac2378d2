// SPDX-License-Identifier: Apache-2.0
#include "server/trace/tracer.h"

#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include <nlohmann/json.hpp>

#include "kernels/base/mutex.h"

namespace precondor::trace {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using Json = nlohmann::json;

constexpr char kTraceId[] = "4bf92f3577b34da6a3ce929d0e0e4736";
constexpr char kSpanId[] = "00f067aa0ba902b7";
const TraceContext kCaller = {kTraceId, kSpanId, true};

// A collector that takes requests when it is told to.
class Collector {
 public:
  explicit Collector(bool open = true) : open_(open) {}
  void Open() {
    MutexLock lock(mu_);
    open_ = true;
    changed_.notify_all();
  }
  void AwaitRequest() {
    MutexLock lock(mu_);
    changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return asked_ > 0; });
  }
  Tracer::Send sender(absl::Status answer = absl::OkStatus()) {
    return [this, answer = std::move(answer)](const std::string& body) {
      MutexLock lock(mu_);
      ++asked_;
      changed_.notify_all();
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return open_; });
      const Json request = Json::parse(body);
      for (const Json& span : request["resourceSpans"][0]["scopeSpans"][0]["spans"]) spans_.push_back(span);
      return answer;
    };
  }
  // After the tracer's end.
  const std::vector<Json>& spans() const { return spans_; }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const Json& span : spans_) names.push_back(span["name"]);
    return names;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool open_;
  int asked_ = 0;
  std::vector<Json> spans_;
};

class TracerTest : public ::testing::Test {
 protected:
  std::unique_ptr<Tracer> Make(Tracer::Send send, Tracer::Options options = {}) {
    return std::make_unique<Tracer>(options, Resource{"1.2.3", "shard", "host/7"}, clock_, logger_, std::move(send));
  }
  RealClock clock_;
  NullLogger logger_;
};

TEST(OtlpTest, HasWhatTheSchemaAsksFor) {
  Span span{.context = {kTraceId, "b7ad6b7169203331", true},
            .parent_span_id = kSpanId,
            .name = "work",
            .kind = SpanKind::kServer,
            .start = absl::FromUnixNanos(5),
            .end = absl::FromUnixNanos(9),
            .status = absl::NotFoundError("no \xff session"),
            .attributes = {{"text", std::string("a")}, {"number", int64_t{1} << 60}, {"real", 0.5}},
            .events = {{"half", absl::FromUnixNanos(7)}},
            .link = kCaller};
  const Json request = Json::parse(EncodeOtlp({"1.2.3", "shard", "host/7"}, {span}, absl::Nanoseconds(1000)));
  const Json& from = request["resourceSpans"][0];
  EXPECT_THAT(from["resource"]["attributes"],
              Contains(Json({{"key", "service.name"}, {"value", {{"stringValue", "precondor-server"}}}})));
  const Json encoded = from["scopeSpans"][0]["spans"][0];
  const Json expected = {
      {"traceId", kTraceId},
      {"spanId", "b7ad6b7169203331"},
      {"parentSpanId", kSpanId},
      {"name", "work"},
      {"kind", 2},
      {"startTimeUnixNano", "1005"},
      {"endTimeUnixNano", "1009"},
      {"attributes", Json::array({{{"key", "text"}, {"value", {{"stringValue", "a"}}}},
                                  {{"key", "number"}, {"value", {{"intValue", "1152921504606846976"}}}},
                                  {{"key", "real"}, {"value", {{"doubleValue", 0.5}}}}})},
      {"events", Json::array({{{"name", "half"}, {"timeUnixNano", "1007"}}})},
      {"links", Json::array({{{"traceId", kTraceId}, {"spanId", kSpanId}}})},
      {"status", {{"code", 2}, {"message", "no \xef\xbf\xbd session"}}}};
  EXPECT_EQ(encoded, expected);
}

TEST_F(TracerTest, SendsAllThatWaitsWhenItEnds) {
  Collector collector;
  auto tracer = Make(collector.sender(), {.batch_spans = 2});
  for (const char* const name : {"a", "b", "c", "d", "e"}) tracer->Record({.context = kCaller, .name = name});
  tracer.reset();
  EXPECT_THAT(collector.names(), ElementsAre("a", "b", "c", "d", "e"));
}

TEST_F(TracerTest, CutsLongTexts) {
  Collector collector;
  auto tracer = Make(collector.sender(), {.text_bytes = 3});
  tracer->Record({.context = kCaller,
                  .name = "call",
                  .status = absl::NotFoundError("abcd"),
                  .attributes = {{"name", std::string("efgh")}, {"step", int64_t{12345}}}});
  tracer.reset();
  ASSERT_THAT(collector.names(), ElementsAre("call"));
  const Json& call = collector.spans()[0];
  EXPECT_EQ(call["status"]["message"], "abc");
  EXPECT_EQ(call["attributes"][0]["value"]["stringValue"], "efg");
  EXPECT_EQ(call["attributes"][1]["value"]["intValue"], "12345");
}

TEST_F(TracerTest, ASlowCollectorBlocksNobodyAndSpansAreCounted) {
  Collector collector(/*open=*/false);
  auto tracer = Make(collector.sender(), {.queue_spans = 3, .batch_spans = 1});
  tracer->Record({.context = kCaller, .name = "first"});
  collector.AwaitRequest();
  for (int i = 0; i < 5; ++i) tracer->Record({.context = kCaller, .name = "more"});
  EXPECT_EQ(tracer->counts().dropped, 2);
  collector.Open();
  tracer.reset();
  EXPECT_EQ(collector.spans().size(), 4u);
}

TEST_F(TracerTest, WhatTheCollectorDoesNotTakeIsDropped) {
  Collector collector;
  auto tracer = Make(collector.sender(absl::UnavailableError("503")), {.batch_spans = 1});
  tracer->Record({.context = kCaller, .name = "a"});
  while (tracer->counts().dropped == 0) std::this_thread::yield();
  EXPECT_EQ(tracer->counts().dropped, 1);
  EXPECT_EQ(tracer->counts().sent, 0);
}

TEST_F(TracerTest, KeepsTheShareAndWhatItsCallerKeeps) {
  Collector collector;
  const auto none = Make(collector.sender()), all = Make(collector.sender(), {.step_share = 1});
  const TraceContext step = TraceOfStep(1, 2);
  EXPECT_FALSE(none->Keeps(step));
  EXPECT_TRUE(all->Keeps(step));
  EXPECT_TRUE(none->Keeps(kCaller));
}

TEST_F(TracerTest, AnOperationIsTheThreadsUntilItEnds) {
  Collector collector;
  auto tracer = Make(collector.sender());
  EXPECT_EQ(Operation::CurrentTrace(), nullptr);
  {
    Operation call(tracer.get(), "call", SpanKind::kServer, tracer->Now(), kCaller, /*keep=*/true);
    ASSERT_NE(Operation::CurrentTrace(), nullptr);
    const TraceContext own = *Operation::CurrentTrace();
    EXPECT_EQ(own.trace_id, kTraceId);
    EXPECT_NE(own.span_id, kSpanId);
    Operation::Annotate("step", int64_t{3});
    {
      const Operation inner(tracer.get(), "inner", SpanKind::kInternal, tracer->Now(), own, /*keep=*/true);
      EXPECT_NE(Operation::CurrentTrace()->span_id, own.span_id);
    }
    EXPECT_EQ(Operation::CurrentTrace()->span_id, own.span_id);
    call.set_status(absl::InternalError("why"));
  }
  EXPECT_EQ(Operation::CurrentTrace(), nullptr);
  tracer.reset();
  ASSERT_THAT(collector.names(), ElementsAre("inner", "call"));
  const Json inner = collector.spans()[0], call = collector.spans()[1];
  EXPECT_EQ(inner["parentSpanId"], call["spanId"]);
  EXPECT_EQ(call["parentSpanId"], kSpanId);
  EXPECT_EQ(call["attributes"][0]["value"]["intValue"], "3");
  EXPECT_EQ(call["status"]["message"], "why");
}

TEST_F(TracerTest, AnOperationThatTurnsOutToMatterIsKept) {
  Collector collector;
  auto tracer = Make(collector.sender());
  { const Operation idle(tracer.get(), "idle", SpanKind::kInternal, tracer->Now(), std::nullopt, /*keep=*/false); }
  {
    const Operation timer(tracer.get(), "timer", SpanKind::kInternal, tracer->Now(), std::nullopt, /*keep=*/false);
    EXPECT_FALSE(Operation::CurrentTrace()->sampled);
    Operation::Keep();
    EXPECT_TRUE(Operation::CurrentTrace()->sampled);
  }
  tracer.reset();
  EXPECT_THAT(collector.names(), ElementsAre("timer"));
}

TEST_F(TracerTest, WithoutATracerTheCallersTraceGoesOn) {
  const Operation call(nullptr, "call", SpanKind::kServer, absl::Time(), kCaller, /*keep=*/false);
  ASSERT_NE(Operation::CurrentTrace(), nullptr);
  EXPECT_EQ(*Operation::CurrentTrace(), kCaller);
  Operation::Keep();
  const Operation untraced(nullptr, "timer", SpanKind::kInternal, absl::Time(), std::nullopt, /*keep=*/false);
  EXPECT_EQ(Operation::CurrentTrace(), nullptr);
}

}  // namespace
}  // namespace precondor::trace
