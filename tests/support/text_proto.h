// SPDX-License-Identifier: Apache-2.0
// Messages of protobuf in its text format.
#pragma once

#include <string>

#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"

#include "kernels/base/check.h"

namespace precondor {

template <typename Message>
Message FromText(const std::string& text) {
  Message message;
  PRECONDOR_CHECK(google::protobuf::TextFormat::ParseFromString(text, &message));
  return message;
}

MATCHER_P(EqualsText, text, "") {
  google::protobuf::util::MessageDifferencer differencer;
  std::string differences;
  differencer.ReportDifferencesToString(&differences);
  const bool equal = differencer.Compare(FromText<std::decay_t<decltype(arg)>>(text), arg);
  *result_listener << differences;
  return equal;
}

}  // namespace precondor
