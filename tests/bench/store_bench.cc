// SPDX-License-Identifier: Apache-2.0
// The log and the snapshots against the same bytes written by hand, in turns, on the same disk. Rows are of bytes a
// second, and of the fraction of what the plain calls reached.
// Usage: store_bench --dir=DIR --json=FILE [--short]
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <string>
#include <unistd.h>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "server/store/posix_file_system.h"
#include "server/store/record_log.h"
#include "server/store/snapshot_store.h"
#include "tests/bench/bench_rows.h"

namespace precondor::store {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::string RandomBytes(uint64_t count) {
  const uint64_t key[] = {count};
  const CounterRandom random(key);
  std::string bytes(count, '\0');
  for (uint64_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(random.Bits(i / 8) >> 8 * (i % 8));
  return bytes;
}

class PlainFile {
 public:
  explicit PlainFile(const std::string& path)
      : fd_(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
    PRECONDOR_CHECK(fd_ >= 0);
  }
  ~PlainFile() { close(fd_); }
  void Write(const std::string& bytes) {
    for (size_t done = 0; done < bytes.size();) {
      const ssize_t count = write(fd_, bytes.data() + done, bytes.size() - done);
      PRECONDOR_CHECK(count > 0);
      done += static_cast<size_t>(count);
    }
  }
  void Sync() { PRECONDOR_CHECK(fdatasync(fd_) == 0); }

 private:
  const int fd_;
};

class Bench {
 public:
  Bench(std::string dir, bool is_short) : dir_(std::move(dir)), short_(is_short) {}

  // `groups` syncs of `records` records each.
  void AppendAndSync(uint64_t record_bytes, int records, int groups) {
    if (short_) groups = 2;
    const std::string payload = RandomBytes(record_bytes);
    Compare(
        absl::StrCat("store/append_sync_", record_bytes, "x", records),
        static_cast<double>(record_bytes) * records * groups,
        [&](const std::string& path) {
          auto log = RecordLog::Open(fs_, path, {}, nullptr);
          PRECONDOR_CHECK(log.ok());
          return ClockSeconds([&] {
            for (int g = 0; g < groups; ++g) {
              for (int i = 0; i < records; ++i) PRECONDOR_CHECK((*log)->Append(1, payload).ok());
              PRECONDOR_CHECK((*log)->Sync().ok());
            }
          });
        },
        [&](const std::string& path) {
          PlainFile file(path);
          return ClockSeconds([&] {
            for (int g = 0; g < groups; ++g) {
              for (int i = 0; i < records; ++i) file.Write(payload);
              file.Sync();
            }
          });
        });
  }

  void Replay(uint64_t record_bytes) {
    const uint64_t count = (short_ ? 4 : 256) * kMiB / record_bytes;
    const std::string payload = RandomBytes(record_bytes), path = JoinPath(dir_, "replayed");
    auto log = RecordLog::Open(fs_, path, {}, nullptr);
    PRECONDOR_CHECK(log.ok());
    for (uint64_t i = 0; i < count; ++i) PRECONDOR_CHECK((*log)->Append(1, payload).ok());
    PRECONDOR_CHECK((*log)->Sync().ok());
    log->reset();
    Compare(
        absl::StrCat("store/open_log_", record_bytes), static_cast<double>(count * record_bytes),
        [&](const std::string&) {
          return ClockSeconds([&] {
            uint64_t seen = 0;
            const auto opened = RecordLog::Open(fs_, path, {}, [&seen](const Record& record) {
              seen += record.payload.size();
              return absl::OkStatus();
            });
            PRECONDOR_CHECK(opened.ok() && seen == count * record_bytes);
          });
        },
        [&](const std::string&) {
          return ClockSeconds([&] {
            const auto names = fs_.List(path);
            PRECONDOR_CHECK(names.ok());
            for (const std::string& name : *names) PRECONDOR_CHECK(fs_.ReadFile(JoinPath(path, name)).ok());
          });
        });
  }

  void Snapshot(int files, uint64_t file_bytes) {
    if (short_) file_bytes = kMiB / 4;
    const std::string bytes = RandomBytes(file_bytes);
    Compare(
        absl::StrCat("store/snapshot_", files, "_files"), static_cast<double>(files) * static_cast<double>(file_bytes),
        [&](const std::string& path) {
          auto store = SnapshotStore::Open(fs_, path);
          PRECONDOR_CHECK(store.ok());
          return ClockSeconds([&] {
            auto writer = (*store)->Begin(1);
            PRECONDOR_CHECK(writer.ok());
            for (int i = 0; i < files; ++i) PRECONDOR_CHECK((*writer)->Add(absl::StrCat("layer-", i), bytes).ok());
            PRECONDOR_CHECK((*writer)->Commit("").ok());
          });
        },
        [&](const std::string& path) {
          PlainFile file(path);
          return ClockSeconds([&] {
            for (int i = 0; i < files; ++i) file.Write(bytes);
            file.Sync();
          });
        });
  }

  const std::vector<BenchRow>& rows() const { return rows_; }

 private:
  using Run = std::function<double(const std::string& path)>;  // seconds

  // Medians of runs in turns, each in a place of its own; one of each before that, uncounted.
  void Compare(const std::string& name, double bytes, const Run& ours, const Run& plain) {
    std::vector<double> our_seconds, plain_seconds;
    const int repetitions = short_ ? 1 : 7;
    for (int i = -1; i < repetitions; ++i) {
      for (const bool is_ours : {true, false}) {
        const std::string path = JoinPath(dir_, "run");
        const double seconds = (is_ours ? ours : plain)(path);
        if (i >= 0) (is_ours ? our_seconds : plain_seconds).push_back(seconds);
        std::filesystem::remove_all(path);
        sync();  // the next run's disk is idle
      }
    }
    const double ours_mb = bytes / Median(our_seconds) / 1e6, plain_mb = bytes / Median(plain_seconds) / 1e6;
    rows_.push_back({name, ours_mb, "MB/s"});
    rows_.push_back({absl::StrCat(name, "_of_plain"), ours_mb / plain_mb, "of plain"});
  }
  const std::string dir_;
  const bool short_;
  PosixFileSystem fs_;
  std::vector<BenchRow> rows_;
};

std::vector<BenchRow> Measure(const std::string& dir, bool is_short) {
  PRECONDOR_CHECK(!dir.empty());
  std::filesystem::create_directories(dir);
  Bench bench(dir, is_short);
  bench.AppendAndSync(256, 1, 200);        // a coordinator's record
  bench.AppendAndSync(64 << 10, 1, 200);   // one layer's update
  bench.AppendAndSync(64 << 10, 144, 10);  // a model's, under one sync
  bench.Replay(64 << 10);
  bench.Snapshot(16, 16 * kMiB);       // 256 MiB
  bench.Snapshot(144, 16 * kMiB / 9);  // the same in as many files as BERT-Large has layers
  std::filesystem::remove_all(dir);
  return bench.rows();
}

}  // namespace
}  // namespace precondor::store

int main(int argc, char** argv) {
  std::string dir;
  return precondor::BenchMain(
      argc, argv, [&](bool is_short) { return precondor::store::Measure(dir, is_short); },
      [&](absl::string_view argument) {
        dir = std::string(argument.substr(argument.find('=') + 1));
        return absl::StartsWith(argument, "--dir=");
      });
}
