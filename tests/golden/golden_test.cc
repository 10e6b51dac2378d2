// SPDX-License-Identifier: Apache-2.0
// Files and messages of earlier releases still mean the same; tests/golden/README.md.
#include <filesystem>
#include <fstream>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "precondor/v1/admin.pb.h"
#include "precondor/v1/precondition.pb.h"
#include "precondor/v1/session.pb.h"
#include "precondor/v1/shard.pb.h"
#include "precondor/v1/snapshot.pb.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/spec_codec.h"
#include "proto/wire/status_codec.h"
#include "proto/wire/tensor_codec.h"
#include "tests/unit/proto/wire/wire_testing.h"

namespace precondor::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;
using google::protobuf::Message;
using google::protobuf::MessageFactory;
using google::protobuf::TextFormat;
using google::protobuf::util::MessageDifferencer;

struct Golden {
  std::string name;  // release/NAME
  std::string bytes;
  std::unique_ptr<Message> expected;
};

std::unique_ptr<Message> NewMessage(const std::string& type) {
  const Descriptor* descriptor = google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName(type);
  if (descriptor == nullptr) return nullptr;
  return std::unique_ptr<Message>(MessageFactory::generated_factory()->GetPrototype(descriptor)->New());
}

std::vector<const FileDescriptor*> Files() {
  return {v1::SessionSpec::descriptor()->file(), v1::OpenSessionRequest::descriptor()->file(),
          v1::FrameHeader::descriptor()->file(), v1::Member::descriptor()->file(),
          v1::LayerStats::descriptor()->file(),  v1::SnapshotInfo::descriptor()->file()};
}

// An entry of a table: "NAME TYPE", lines of bytes in hex, lines of text.
void Add(const std::string& release, absl::string_view entry, std::vector<Golden>& goldens) {
  std::vector<std::string> lines = absl::StrSplit(entry, '\n');
  const std::vector<std::string> head = absl::StrSplit(lines[0], ' ');
  ASSERT_EQ(head.size(), 2u) << lines[0];
  Golden golden{absl::StrCat(release, "/", head[0]), "", NewMessage(head[1])};
  ASSERT_NE(golden.expected, nullptr) << golden.name << ": no message " << head[1];
  size_t text = 1;
  for (absl::string_view hex; text < lines.size(); ++text) {
    hex = lines[text];
    if (!absl::ConsumePrefix(&hex, "hex:")) break;
    absl::StrAppend(&golden.bytes, absl::HexStringToBytes(absl::StripAsciiWhitespace(hex)));
  }
  ASSERT_GT(text, 1u) << golden.name << ": no bytes: tests/golden/README.md";
  lines.erase(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(text));
  EXPECT_TRUE(TextFormat::ParseFromString(absl::StrJoin(lines, "\n"), golden.expected.get())) << golden.name;
  goldens.push_back(std::move(golden));
}

std::vector<Golden> Load() {
  Files();  // links every file's descriptors in
  std::vector<Golden> goldens;
  for (const auto& table : std::filesystem::directory_iterator(PRECONDOR_GOLDEN_DIR)) {
    const std::string release = table.path().stem().string();
    if (table.path().extension() != ".golden") continue;
    std::stringstream text;
    text << std::ifstream(table.path()).rdbuf();
    std::vector<std::string> entries = absl::StrSplit(text.str(), "\n== ");
    for (size_t i = 1; i < entries.size(); ++i) Add(release, entries[i], goldens);
  }
  return goldens;
}

// The bytes of an entry.
std::string Bytes(const std::string& name) {
  for (const Golden& golden : Load()) {
    if (golden.name == name) return golden.bytes;
  }
  ADD_FAILURE() << "no " << name;
  return "";
}

absl::StatusOr<SessionSpec> SpecOf(const std::string& name) {
  v1::OpenSessionRequest request;
  EXPECT_TRUE(request.ParseFromString(Bytes(name)));
  return DecodeSessionSpec(request.spec());
}

TEST(GoldenTest, BytesStillMeanWhatTheyMeant) {
  const std::vector<Golden> goldens = Load();
  ASSERT_GE(goldens.size(), 120u);
  for (const Golden& golden : goldens) {
    SCOPED_TRACE(golden.name);
    const std::unique_ptr<Message> decoded(golden.expected->New());
    ASSERT_TRUE(decoded->ParseFromString(golden.bytes));
    std::string difference;
    MessageDifferencer differencer;
    differencer.ReportDifferencesToString(&difference);
    EXPECT_TRUE(differencer.Compare(*golden.expected, *decoded)) << difference;
  }
}

TEST(GoldenTest, FieldsOfALaterReleaseAreKeptAndDisturbNothing) {
  // Fields 1000 (varint), 1001 (fixed64), 1002 (bytes) and 1003 (fixed32).
  const std::string before("\xC0\x3E\x96\x01\xC9\x3E\x01\x02\x03\x04\x05\x06\x07\x08", 14);
  const std::string after("\xD2\x3E\x02hi\xDD\x3E\x01\x02\x03\x04", 11);
  for (const Golden& golden : Load()) {
    SCOPED_TRACE(golden.name);
    const std::unique_ptr<Message> decoded(golden.expected->New());
    ASSERT_TRUE(decoded->ParseFromString(absl::StrCat(before, golden.bytes, after)));
    EXPECT_EQ(decoded->GetReflection()->GetUnknownFields(*decoded).field_count(), 4);
    decoded->DiscardUnknownFields();
    EXPECT_TRUE(MessageDifferencer::Equals(*golden.expected, *decoded));
  }
}

// The hot path reads frames by hand: it has to agree.
TEST(GoldenTest, FrameCodecReadsTheFrames) {
  int frames = 0;
  const auto check = [&](const Message& expected, const std::string& bytes, auto decode) {
    auto received = decode(Sliced(bytes, {bytes.size() / 3, bytes.size() / 2}));
    ASSERT_TRUE(received.ok()) << received.status();
    received->message.set_payload(Joined(received->payload));
    EXPECT_TRUE(MessageDifferencer::Equals(expected, received->message));
    ++frames;
  };
  for (const Golden& golden : Load()) {
    SCOPED_TRACE(golden.name);
    const std::string& type = golden.expected->GetDescriptor()->name();
    if (type == "ExchangeRequest") check(*golden.expected, golden.bytes, DecodeRequest);
    if (type == "ExchangeResponse") check(*golden.expected, golden.bytes, DecodeResponse);
  }
  EXPECT_GE(frames, 8);
}

TEST(GoldenTest, TheSpecDecodesToTheSameValues) {
  const absl::StatusOr<SessionSpec> spec = SpecOf("v0.1.0/open_session_request");
  ASSERT_TRUE(spec.ok()) << spec.status();
  SessionSpec expected;
  expected.name = "digits-1";
  expected.seed = 18446744073709551615ull;
  expected.world_size = 4;
  expected.exchange = ExchangeMode::kDelegate;
  expected.statistics = StatisticsKind::kSigned;
  expected.sketches = 4;
  expected.inv_freq = 5;
  expected.warmup_steps = 0;
  expected.statistics_dtype = DType::kBF16;
  expected.gradient_dtype = DType::kF16;
  expected.method.options = {{"rule", std::string("EXACT_DAMPED")},
                             {"representation", std::string("LOW_RANK")},
                             {"rank", 16.0},
                             {"gamma", 0.9},
                             {"damping", 0.25},
                             {"scaling", std::string("KL_CLIP")},
                             {"scaling_clip", 0.01},
                             {"clip", 50.0},
                             {"zeta", 0.8},
                             {"norm_threshold", 10.0}};
  expected.layers = {{"encoder.0", 48, 65, true},
                     {"d\xC3\xA9"
                      "codeur",
                      1, 1 << 20, false}};
  EXPECT_EQ(*spec, expected);
}

TEST(GoldenTest, FieldsOfASessionThatAreGoneDisturbNothing) {
  v1::OpenSessionRequest request;  // with a data_plane, staleness_steps 1 and on_shard_loss DEGRADE
  ASSERT_TRUE(request.ParseFromString(absl::HexStringToBytes("0a180a0473756d73180248016a070a0177100218037802880102")));
  const absl::StatusOr<SessionSpec> spec = DecodeSessionSpec(request.spec());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name, "sums");
  EXPECT_EQ(spec->layers, (std::vector<LayerSpec>{{"w", 2, 3}}));
}

TEST(GoldenTest, AFieldOfAShardsSessionsThatIsGoneDisturbsNothing) {
  v1::DescribeShardResponse response;  // with factors_released
  ASSERT_TRUE(response.ParseFromString(absl::HexStringToBytes(
      "0a0c73686172642d313a373037311080808080201880202a1d0881c0d9cfd285ffbc18120a626572742d72756e2d3718032080202801")));
  EXPECT_EQ(response.sessions(0).reserved_bytes(), 4096u);
  v1::InstallSessionRequest install;  // with factors_released
  ASSERT_TRUE(install.ParseFromString(absl::HexStringToBytes("082a100340016801")));
  EXPECT_EQ(install.session_id(), 42u);
  EXPECT_TRUE(install.must_be_held());
}

TEST(GoldenTest, AnOptionOfAMethodThatIsGoneIsRefused) {
  v1::OpenSessionRequest request;  // with mkor's split_dim
  ASSERT_TRUE(request.ParseFromString(absl::HexStringToBytes(
      "0a330a0973706c69745f64696d180162180a160a05424c454e44120544454e534558808004608080016a0a0a017710882718d08603")));
  const absl::Status refused = DecodeSessionSpec(request.spec()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_TRUE(absl::StrContains(refused.message(), "got unknown field 12")) << refused;
}

TEST(GoldenTest, TheFallbackDecodesToTheSameValues) {
  const absl::StatusOr<SessionSpec> spec = SpecOf("v0.1.0/open_session_request_fallback");
  ASSERT_TRUE(spec.ok()) << spec.status();
  const FallbackConfig expected = {.policy = FallbackPolicy::kAtStep,
                                   .at_step = 5000,
                                   .rate_decay = 0.98,
                                   .lr_jump = 0.2,
                                   .min_steps = 300,
                                   .beta = 0.15,
                                   .patience_steps = 40};
  EXPECT_EQ(spec->fallback, expected);
}

TEST(GoldenTest, StatisticsDecodeToTheSameElements) {
  const auto received = DecodeRequest(Sliced(Bytes("v0.1.0/exchange_statistics")));
  ASSERT_TRUE(received.ok()) << received.status();
  const auto formats = DecodeTensorHeaders(received->message.header().tensors());
  ASSERT_TRUE(formats.ok()) << formats.status();
  ASSERT_EQ(formats->size(), 2u);
  const std::string bytes = Joined(received->payload);
  const auto payload = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  float a[2], g[1];
  ASSERT_EQ(payload.size(), 6u);
  DecodeElements((*formats)[0].dtype, payload.data(), (*formats)[0].scale, absl::MakeSpan(a));
  DecodeElements((*formats)[1].dtype, payload.data() + 4, (*formats)[1].scale, absl::MakeSpan(g));
  EXPECT_EQ(a[0], 4.0f);   // 0x3C00 is 1, times 4
  EXPECT_EQ(a[1], -4.0f);  // 0xBC00
  EXPECT_EQ(g[0], 1.0f);   // 0x4000 is 2, times 1/2
}

void CollectFields(const Message& message, std::set<std::string>& seen) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    seen.insert(field->full_name());
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    const int count = field->is_repeated() ? message.GetReflection()->FieldSize(message, field) : 1;
    for (int i = 0; i < count; ++i) {
      CollectFields(field->is_repeated() ? message.GetReflection()->GetRepeatedMessage(message, field, i)
                                         : message.GetReflection()->GetMessage(message, field),
                    seen);
    }
  }
}

// A new message or field needs a golden message that has it.
TEST(GoldenTest, EveryFieldOfEveryMessageIsThere) {
  std::set<std::string> seen;
  for (const Golden& golden : Load()) CollectFields(*golden.expected, seen);
  for (const FileDescriptor* file : Files()) {
    for (int i = 0; i < file->message_type_count(); ++i) {
      for (int j = 0; j < file->message_type(i)->field_count(); ++j) {
        const std::string& field = file->message_type(i)->field(j)->full_name();
        EXPECT_TRUE(seen.count(field)) << field << " is in no golden message: tests/golden/README.md";
      }
    }
  }
}

}  // namespace
}  // namespace precondor::wire
