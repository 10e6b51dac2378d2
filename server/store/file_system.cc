// SPDX-License-Identifier: Apache-2.0
#include "server/store/file_system.h"

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor::store {

std::string JoinPath(absl::string_view dir, absl::string_view name) {
  return absl::StrCat(dir == "/" ? "" : dir, "/", name);
}

std::string ParentDir(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos) return ".";
  return std::string(slash == 0 ? "/" : path.substr(0, slash));
}

absl::Status WritableFile::AppendPieces(absl::Span<const absl::string_view> pieces) {
  for (const absl::string_view piece : pieces) {
    if (!piece.empty()) PRECONDOR_RETURN_IF_ERROR(Append(piece));
  }
  return absl::OkStatus();
}

absl::Status MakeDirDurably(FileSystem& fs, const std::string& path) {
  PRECONDOR_RETURN_IF_ERROR(fs.MakeDir(path));
  return fs.SyncDir(ParentDir(path));
}

absl::Status WriteFileDurably(FileSystem& fs, const std::string& path, absl::string_view bytes) {
  const std::string unfinished = absl::StrCat(path, ".tmp");
  if (absl::Status left = fs.RemoveFile(unfinished); !left.ok() && !absl::IsNotFound(left)) return left;
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, fs.Create(unfinished));
  PRECONDOR_RETURN_IF_ERROR(file->Append(bytes));
  PRECONDOR_RETURN_IF_ERROR(file->Sync());
  PRECONDOR_RETURN_IF_ERROR(file->Close());
  PRECONDOR_RETURN_IF_ERROR(fs.Rename(unfinished, path));
  return fs.SyncDir(ParentDir(path));
}

}  // namespace precondor::store
