// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/job.h"

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"

namespace precondor::digits {
namespace {

using nlohmann::json;

json ToJson(const CurvePoint& point) {
  return json::array({point.step, point.held_out_loss, point.held_out_accuracy, point.training_loss});
}

CurvePoint PointFrom(const json& value) {
  return CurvePoint{value.at(0).get<int64_t>(), value.at(1).get<double>(), value.at(2).get<double>(),
                    value.at(3).get<double>()};
}

json ToJson(const Stretch& stretch) {
  return json::array({stretch.first_step, static_cast<int>(stretch.mode), stretch.steps, stretch.seconds,
                      stretch.statistics_bytes, stretch.gradient_bytes});
}

Stretch StretchFrom(const json& value) {
  return Stretch{value.at(0).get<uint64_t>(), static_cast<Mode>(value.at(1).get<int>()),
                 value.at(2).get<int64_t>(),  value.at(3).get<double>(),
                 value.at(4).get<int64_t>(),  value.at(5).get<int64_t>()};
}

json ToJson(const Run& run) {
  return json{{"task", run.task.name},
              {"steps", run.task.steps},
              {"method", run.method.name},
              {"fallback", run.method.fallback},
              {"optimizer", run.optimizer},
              {"exchange", static_cast<int>(run.exchange)},
              {"workers", run.workers},
              {"seed", run.seed},
              {"learning_rate", run.learning_rate},
              {"on_shard_loss", static_cast<int>(run.on_shard_loss)}};
}

absl::StatusOr<Run> RunFrom(const json& value) {
  Run run;
  PRECONDOR_ASSIGN_OR_RETURN(run.task, FindTask(value.at("task").get<std::string>()));
  PRECONDOR_ASSIGN_OR_RETURN(run.method, FindMethod(value.at("method").get<std::string>()));
  run.method.fallback = value.at("fallback").get<std::string>();
  PRECONDOR_RETURN_IF_ERROR(FindFallback(run.method.fallback).status());
  run.task.steps = value.at("steps").get<int64_t>();
  run.optimizer = value.at("optimizer").get<std::string>();
  run.exchange = static_cast<ExchangeMode>(value.at("exchange").get<int>());
  run.on_shard_loss = static_cast<ShardLossPolicy>(value.at("on_shard_loss").get<int>());
  run.workers = value.at("workers").get<int32_t>();
  run.seed = value.at("seed").get<uint64_t>();
  run.learning_rate = value.at("learning_rate").get<double>();
  return run;
}

json ToJson(const RunResult& result) {
  json curve = json::array();
  for (const CurvePoint& point : result.curve) curve.push_back(ToJson(point));
  json stretches = json::array();
  for (const Stretch& stretch : result.stretches) stretches.push_back(ToJson(stretch));
  return json{{"curve", curve},
              {"stretches", stretches},
              {"seconds", result.seconds},
              {"steps", result.steps},
              {"skipped_steps", result.skipped_steps},
              {"statistics_bytes", result.statistics_bytes},
              {"gradient_bytes", result.gradient_bytes},
              {"weights_hash", result.weights_hash}};
}

RunResult ResultFrom(const json& value) {
  RunResult result;
  for (const json& point : value.at("curve")) result.curve.push_back(PointFrom(point));
  for (const json& stretch : value.at("stretches")) result.stretches.push_back(StretchFrom(stretch));
  result.seconds = value.at("seconds").get<double>();
  result.steps = value.at("steps").get<int64_t>();
  result.skipped_steps = value.at("skipped_steps").get<int64_t>();
  result.statistics_bytes = value.at("statistics_bytes").get<int64_t>();
  result.gradient_bytes = value.at("gradient_bytes").get<int64_t>();
  result.weights_hash = value.at("weights_hash").get<uint64_t>();
  return result;
}

// Parses and hands over to `decode`; the JSON library's exceptions end here.
template <typename T, typename Decode>
absl::StatusOr<T> Decoded(absl::string_view text, absl::string_view what, Decode decode) {
  try {
    return decode(json::parse(text.begin(), text.end()));
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("not a ", what, ": ", error.what()));
  }
}

}  // namespace

std::string EncodeJob(const Job& job) {
  json runs = json::array();
  for (const Run& run : job.runs) runs.push_back(ToJson(run));
  return json{{"data_path", job.data_path},
              {"coordinator", job.coordinator},
              {"session_prefix", job.session_prefix},
              {"worker_restarts", job.worker_restarts},
              {"checkpoint_dir", job.checkpoint_dir},
              {"workers", job.workers},
              {"reducer_elements", job.reducer_elements},
              {"runs", runs}}
      .dump();
}

absl::StatusOr<Job> DecodeJob(absl::string_view text) {
  return Decoded<Job>(text, "job", [](const json& value) -> absl::StatusOr<Job> {
    Job job;
    job.data_path = value.at("data_path").get<std::string>();
    job.coordinator = value.at("coordinator").get<std::string>();
    job.session_prefix = value.at("session_prefix").get<std::string>();
    job.workers = value.at("workers").get<int32_t>();
    job.worker_restarts = value.at("worker_restarts").get<int32_t>();
    job.checkpoint_dir = value.at("checkpoint_dir").get<std::string>();
    job.reducer_elements = value.at("reducer_elements").get<int64_t>();
    for (const json& encoded : value.at("runs")) {
      PRECONDOR_ASSIGN_OR_RETURN(Run run, RunFrom(encoded));
      job.runs.push_back(std::move(run));
    }
    return job;
  });
}

std::string EncodeReport(const WorkerReport& report) {
  json value{{"run", report.run}};
  if (report.done) {
    value["result"] = ToJson(report.result);
  } else {
    value["point"] = ToJson(report.point);
  }
  return value.dump();
}

absl::StatusOr<WorkerReport> DecodeReport(absl::string_view line) {
  return Decoded<WorkerReport>(line, "worker report", [](const json& value) -> absl::StatusOr<WorkerReport> {
    WorkerReport report;
    report.run = value.at("run").get<int64_t>();
    report.done = value.contains("result");
    if (report.done) {
      report.result = ResultFrom(value.at("result"));
    } else {
      report.point = PointFrom(value.at("point"));
    }
    return report;
  });
}

uint64_t HashWeights(const std::vector<HostMatrix>& weights) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (const HostMatrix& weight : weights) {
    for (const float value : weight.data()) {
      uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ ((bits >> shift) & 0xFF)) * 0x100000001B3ull;
    }
  }
  return hash;
}

}  // namespace precondor::digits
