// SPDX-License-Identifier: Apache-2.0
// The method of a request: each of this protocol's methods has a request type of its own.
#pragma once

#include <google/protobuf/descriptor.h>
#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"

namespace precondor::wire {

// Returns the name of the method that takes this type, in gRPC's form: /package.Service/Method. Precondition: a service
// in the type's file has such a method.
inline std::string MethodPath(const google::protobuf::Descriptor& request) {
  const google::protobuf::FileDescriptor& file = *request.file();
  for (int s = 0; s < file.service_count(); ++s) {
    for (int m = 0; m < file.service(s)->method_count(); ++m) {
      const google::protobuf::MethodDescriptor& method = *file.service(s)->method(m);
      if (method.input_type() == &request) return absl::StrCat("/", file.service(s)->full_name(), "/", method.name());
    }
  }
  PRECONDOR_CHECK(false);
}

}  // namespace precondor::wire
