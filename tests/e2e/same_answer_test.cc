// SPDX-License-Identifier: Apache-2.0
// Training through the service gives what training in one process gives, in whatever order the ranks send.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "server/app/app.h"
#include "tests/e2e/trainer/model.h"
#include "tests/e2e/trainer/trainer.h"
#include "tests/e2e/training.h"

namespace precondor::e2e {
namespace {

// A coordinator and its shards on loopback, each the whole server as main() starts it, in this process.
class LocalService {
 public:
  // Serves when it returns, on free ports.
  static absl::StatusOr<std::unique_ptr<LocalService>> Start(int shards);

  std::string coordinator() const { return AddressOf(*coordinator_); }

 private:
  LocalService() = default;
  static std::string AddressOf(const App& app);

  NullLogger logger_;
  std::vector<std::unique_ptr<App>> shards_;
  std::unique_ptr<App> coordinator_;  // goes first
};

std::string LocalService::AddressOf(const App& app) { return absl::StrCat("127.0.0.1:", app.port()); }

absl::StatusOr<std::unique_ptr<LocalService>> LocalService::Start(int shards) {
  std::unique_ptr<LocalService> service(new LocalService());
  ServerConfig config;
  config.listen = {"127.0.0.1:0"};
  config.role = ServerRole::kShard;
  ServerConfig coordinator = config;
  coordinator.role = ServerRole::kCoordinator;
  for (int i = 0; i < shards; ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<App> shard, App::Start(config, service->logger_));
    coordinator.shards.push_back(AddressOf(*shard));
    service->shards_.push_back(std::move(shard));
  }
  PRECONDOR_ASSIGN_OR_RETURN(service->coordinator_, App::Start(coordinator, service->logger_));
  return service;
}

constexpr int64_t kSteps = 200;

// Both sides do the same arithmetic on the same vectors. They differ in the order of f32 sums: one gradient over the
// whole batch here, the mean of the workers' gradients there. That is 1e-7 a step and hardly grows with SGD.
constexpr double kSgdBound = 1e-5;
// AdamW's first steps are close to sign(u) and magnify rounding where |u| is near epsilon (1e-8).
constexpr double kAdamwBound = 1e-4;
// Whitening divides by small directions of the gradient, and so enlarges what was rounded differently.
constexpr double kWhitenedBound = 2e-4;
// Values that were rounded differently may lie on two sides of a bound between two f16.
constexpr double kF16Bound = 5e-4;

struct Case {
  int shards;
  int32_t workers;
  ExchangeMode exchange;
  const char* method;
  const char* optimizer;
  double bound;
  DType statistics = DType::kF32;  // on the wire
};

void PrintTo(const Case& test, std::ostream* out) {
  *out << test.shards << " shards, " << test.workers << " workers, " << std::string(ExchangeModeName(test.exchange))
       << ", " << test.method << ", " << test.optimizer << ", " << std::string(DTypeName(test.statistics));
}

digits::Run RunOf(const Case& test) {
  digits::Run run = RunOfRow(test.method, kSteps);
  run.optimizer = test.optimizer;
  run.session.exchange = test.exchange;
  run.session.world_size = test.workers;
  run.session.statistics_dtype = test.statistics;
  run.learning_rate = run.optimizer == "sgd" ? 0.1 : 0.016;
  return run;
}

class SameAnswerTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    auto data = digits::LoadDigits(PRECONDOR_DIGITS_DATA);
    ASSERT_TRUE(data.ok()) << data.status();
    data_ = *std::move(data);
    auto service = LocalService::Start(GetParam().shards);
    ASSERT_TRUE(service.ok()) << service.status();
    service_ = *std::move(service);
  }

  absl::StatusOr<std::vector<std::vector<digits::HostMatrix>>> Train(const std::string& session,
                                                                     uint64_t shuffle_seed) {
    return TrainThroughService(ServiceRun{service_->coordinator(), session, RunOf(GetParam()), shuffle_seed}, data_);
  }

  digits::DigitsData data_;
  std::unique_ptr<LocalService> service_;
};

TEST_P(SameAnswerTest, AsTrainingInOneProcess) {
  const auto through = Train("same", 0);
  ASSERT_TRUE(through.ok()) << through.status();
  const auto direct = TrainInProcess(RunOf(GetParam()), data_);
  ASSERT_TRUE(direct.ok()) << direct.status();
  const double difference = RelativeDifference(through->front(), direct->weights());
  RecordProperty("relative_difference", absl::StrCat(difference));
  EXPECT_LE(difference, GetParam().bound);
  for (const auto& replica : *through) {
    EXPECT_EQ(digits::HashWeights(replica), digits::HashWeights(through->front())) << "replicas differ";
  }
}

INSTANTIATE_TEST_SUITE_P(Service, SameAnswerTest,
                         ::testing::Values(Case{1, 1, ExchangeMode::kDirect, "signed", "sgd", kSgdBound},
                                           Case{1, 4, ExchangeMode::kDirect, "signed-lowrank", "sgd", kSgdBound},
                                           Case{1, 7, ExchangeMode::kDelegate, "signed", "sgd", kSgdBound},
                                           Case{3, 1, ExchangeMode::kDelegate, "signed-lowrank", "adamw", kAdamwBound},
                                           Case{3, 4, ExchangeMode::kDirect, "mean", "adamw", kAdamwBound},
                                           Case{3, 4, ExchangeMode::kDelegate, "signed-lowrank", "sgd", kSgdBound},
                                           Case{3, 4, ExchangeMode::kDirect, "signed", "adamw", kAdamwBound},
                                           Case{3, 7, ExchangeMode::kDirect, "signed", "sgd", kSgdBound},
                                           Case{3, 7, ExchangeMode::kDirect, "signed", "sgd", kF16Bound, DType::kF16},
                                           Case{3, 7, ExchangeMode::kDelegate, "blend", "sgd", kSgdBound},
                                           Case{3, 7, ExchangeMode::kDirect, "reference", "sgd", kSgdBound},
                                           Case{3, 4, ExchangeMode::kDirect, "eva", "sgd", kSgdBound},
                                           Case{3, 4, ExchangeMode::kDirect, "kfac", "sgd", kSgdBound},
                                           Case{3, 7, ExchangeMode::kDelegate, "kfac-covariance", "sgd", kSgdBound},
                                           Case{1, 4, ExchangeMode::kDirect, "kfac-covariance", "sgd", kSgdBound},
                                           Case{3, 4, ExchangeMode::kDirect, "kron", "plain", kWhitenedBound},
                                           // One worker: SOAP begins with a basis of the first gradient, whose null
                                           // space rounding decides on, and gives every direction steps of one length.
                                           Case{3, 1, ExchangeMode::kDelegate, "soap", "plain", kSgdBound},
                                           Case{3, 4, ExchangeMode::kDirect, "muon", "plain", kWhitenedBound},
                                           Case{3, 4, ExchangeMode::kDelegate, "muon", "plain", kWhitenedBound},
                                           Case{1, 1, ExchangeMode::kReplay, "signed-lowrank", "adamw", kAdamwBound},
                                           Case{3, 4, ExchangeMode::kReplay, "signed-lowrank", "sgd", kSgdBound},
                                           Case{3, 4, ExchangeMode::kReplay, "eva", "sgd", kSgdBound},
                                           Case{3, 4, ExchangeMode::kPullFactors, "signed-lowrank", "sgd", kSgdBound},
                                           Case{1, 4, ExchangeMode::kPullFactors, "signed", "sgd", kSgdBound},
                                           Case{3, 4, ExchangeMode::kDirect, "none", "adamw", kAdamwBound}));

using ArrivalOrderTest = SameAnswerTest;

TEST_P(ArrivalOrderTest, DoesNotChangeABit) {
  const auto plain = Train("plain", 0);
  ASSERT_TRUE(plain.ok()) << plain.status();
  for (const uint64_t shuffle_seed : {1, 2}) {
    const auto shuffled = Train(absl::StrCat("shuffled-", shuffle_seed), shuffle_seed);
    ASSERT_TRUE(shuffled.ok()) << shuffled.status();
    EXPECT_EQ(digits::HashWeights(shuffled->front()), digits::HashWeights(plain->front()));
  }
}

INSTANTIATE_TEST_SUITE_P(Service, ArrivalOrderTest,
                         ::testing::Values(Case{3, 7, ExchangeMode::kDirect, "signed-lowrank", "adamw", 0},
                                           Case{1, 4, ExchangeMode::kDirect, "mean", "adamw", 0}));

}  // namespace
}  // namespace precondor::e2e
