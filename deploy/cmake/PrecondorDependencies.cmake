# SPDX-License-Identifier: Apache-2.0
# Every package the build looks for, in one place. kernels/ needs Abseil and a BLAS alone.
find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(OpenBLAS CONFIG REQUIRED)
find_package(ISAL MODULE REQUIRED)  # CRC-32C of what server/store writes
if(PRECONDOR_HIGHWAY)
  find_package(HWY CONFIG QUIET)
endif()
if(NOT TARGET hwy::hwy)
  message(STATUS "No Highway (libhwy-dev): symmetric matrices go through the BLAS tile by tile, slower and in f32 alone")
endif()
find_package(dnnl CONFIG)  # its config wants OpenCL headers too
if(PRECONDOR_SERVICE OR PRECONDOR_RECOVERY)
  # Module mode: it defines protobuf::protoc and protobuf_generate as Debian's gRPC config expects.
  find_package(Protobuf MODULE REQUIRED)
  find_package(gRPC CONFIG REQUIRED)
endif()
if(PRECONDOR_SERVICE)
  find_package(prometheus-cpp CONFIG REQUIRED)
  find_package(yaml-cpp REQUIRED)
  find_package(nlohmann_json REQUIRED)
endif()
if(PRECONDOR_TESTS)
  find_package(GTest REQUIRED)
endif()
if(PRECONDOR_TESTS AND PRECONDOR_BENCH)
  find_package(benchmark REQUIRED)
endif()
