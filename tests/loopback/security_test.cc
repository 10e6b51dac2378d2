// SPDX-License-Identifier: Apache-2.0
// Servers with TLS, certificates of clients and access files, over TCP in this process.
#include <arpa/inet.h>
#include <memory>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <string>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"

#include "client/cpp/tools/ctl_commands.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "precondor/client.h"
#include "precondor/v1/shard.grpc.pb.h"
#include "precondor/v1/snapshot.pb.h"
#include "proto/wire/certificates.h"
#include "proto/wire/channel_security.h"
#include "tests/loopback/generic_call.h"
#include "tests/loopback/raw_client.h"
#include "tests/support/certificates.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kWorkerToken[] = "worker-token-0123456789";
constexpr char kOperatorToken[] = "operator-token-0123456789";
constexpr char kCoordinatorToken[] = "coordinator-token-0123456789";
constexpr char kHost[] = "IP:127.0.0.1,DNS:localhost";

SessionSpec OneLayer() {
  SessionSpec spec;
  spec.name = "test";
  spec.method.name = "identity";
  spec.statistics = StatisticsKind::kMean;
  spec.layers = {{"layer", 2, 3, false}};
  return spec;
}

// One step of a session of OneLayer(): the mean of one gradient is that gradient.
void ExpectStep(Worker& worker, uint64_t step) {
  std::vector<float> gradient = {1, 2, 3, 4, 5, static_cast<float>(step)};
  const std::vector<float> want = gradient;
  const MatrixView view(gradient.data(), 2, 3);
  const auto answer = worker.Precondition(step, 0, {view, view}, 1).Wait();
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(gradient, want);
  const auto reported = worker.ReportStep(step, 1.0, 1, true, 0.1).Wait();
  EXPECT_TRUE(reported.ok()) << reported.status();
}

// TLS to the server with versions from `least` to `most`; the serial number of its certificate, or -1.
long SerialAt(int port, int least, int most) {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free);
  SSL_CTX_set_security_level(context.get(), 0);
  SSL_CTX_set_min_proto_version(context.get(), least);
  SSL_CTX_set_max_proto_version(context.get(), most);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const std::unique_ptr<SSL, decltype(&SSL_free)> tls(SSL_new(context.get()), SSL_free);
  SSL_set_fd(tls.get(), fd);
  long serial = -1;
  if (SSL_connect(tls.get()) == 1) {
    X509* const certificate = SSL_get1_peer_certificate(tls.get());
    serial = ASN1_INTEGER_get(X509_get0_serialNumber(certificate));
    X509_free(certificate);
  }
  close(fd);
  return serial;
}

class SecurityTest : public ::testing::Test {
 protected:
  SecurityTest() {
    Write("ca", authority_.pem());
    Write("other-ca", other_.pem());
    Write("server", authority_.Issue({.common_name = "server", .names = kHost}));
    Write("worker", authority_.Issue({.common_name = "no", .names = "DNS:worker.test"}));
  }

  std::string Path(const std::string& name) const { return absl::StrCat(folder_.path(), "/", name); }
  void Write(const std::string& name, const std::string& text) { WriteAtOnce(Path(name), text); }
  void Write(const std::string& name, const Pem& pem) {
    Write(name + ".pem", pem.certificate);
    Write(name + ".key", pem.key);
  }

  ServerConfig Config() const {
    ServerConfig config;
    config.listen = {"127.0.0.1:0"};
    config.threads = 1;
    config.tls_cert = Path("server.pem");
    config.tls_key = Path("server.key");
    config.reconcile_interval_ms = 50;
    return config;
  }
  ServerConfig MutualConfig() const {
    ServerConfig config = Config();
    config.tls_client_ca = Path("ca");
    return config;
  }
  std::unique_ptr<App> Start(const ServerConfig& config) {
    auto app = App::Start(config, logger_);
    EXPECT_TRUE(app.ok()) << app.status();
    return *std::move(app);
  }
  absl::Status StartStatus(const ServerConfig& config) { return App::Start(config, logger_).status(); }

  ClientSecurity Files(const std::string& certificate, const std::string& token = "") {
    ClientSecurity files{.tls_ca = Path("ca")};
    if (!certificate.empty()) files.tls_cert = Path(certificate + ".pem");
    if (!certificate.empty()) files.tls_key = Path(certificate + ".key");
    if (token.empty()) return files;
    files.token_file = Path("token");
    Write("token", token + "\n");
    return files;
  }
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const App& app, const ClientSecurity& files,
                                                         absl::Duration timeout = absl::Seconds(60)) {
    ClientOptions options;
    options.coordinator = app.addresses().front();
    options.security = files;
    options.connect_timeout = timeout;
    return Client::Connect(options);
  }
  // The error of a client that cannot connect; it gives up soon.
  static std::string Refusal(const App& app, const ClientSecurity& files) {
    const auto client = Connect(app, files, absl::Milliseconds(300));
    EXPECT_FALSE(client.ok());
    return std::string(client.status().message());
  }
  static absl::Status Ctl(const App& app, const ClientSecurity& files, std::vector<std::string> words) {
    words.push_back("--server=" + app.addresses().front());
    auto options = ParseCtlOptions(words);
    EXPECT_TRUE(options.ok()) << options.status();
    options->security = files;
    return RunCtlCommand(*options).status();
  }
  void WriteAccess(const std::string& text) { Write("access", text); }

  const TempDir folder_;
  TestAuthority authority_{"the authority"};
  TestAuthority other_{"another authority"};
  NullLogger logger_;
};

TEST_F(SecurityTest, TrainsOverMutualTlsThroughACoordinatorWithTwoShards) {
  ServerConfig config = MutualConfig();
  config.role = ServerRole::kShard;
  const std::unique_ptr<App> first = Start(config), second = Start(config);
  config.role = ServerRole::kCoordinator;
  config.shards = {first->addresses().front(), second->addresses().front()};
  config.tls_ca = Path("ca");
  const std::unique_ptr<App> coordinator = Start(config);
  const auto client = Connect(*coordinator, Files("worker"));
  ASSERT_TRUE(client.ok()) << client.status();
  const auto opened = (*client)->OpenSession(OneLayer());
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto worker = (*client)->Join("test", {0, 1});
  ASSERT_TRUE(worker.ok()) << worker.status();
  for (uint64_t step = 0; step < 3; ++step) ExpectStep(**worker, step);
}

TEST_F(SecurityTest, RefusesEachWrongConnectionWithItsReasonAndGoesOn) {
  const std::unique_ptr<App> app = Start(MutualConfig());
  Write("expired", authority_.Issue({"e", "DNS:worker.test", -absl::Hours(2), -absl::Hours(1)}));
  Write("early", authority_.Issue({"e", "DNS:worker.test", absl::Hours(1), absl::Hours(2)}));
  Write("foreign", other_.Issue({"f", "DNS:worker.test"}));
  ClientSecurity wrong_authority = Files("worker");
  wrong_authority.tls_ca = Path("other-ca");
  EXPECT_THAT(Refusal(*app, wrong_authority), HasSubstr("certificate verify failed"));
  EXPECT_THAT(Refusal(*app, ClientSecurity()), HasSubstr("the server may expect TLS"));
  for (const char* certificate : {"expired", "early", "foreign", ""}) {
    EXPECT_THAT(Refusal(*app, Files(certificate)), HasSubstr("the server may refuse this client's certificate"))
        << certificate;
  }
  const auto client = Connect(*app, Files("worker"));
  EXPECT_TRUE(client.ok()) << client.status();
}

TEST_F(SecurityTest, ClientRefusesAServerWhoseCertificateIsWrong) {
  const std::vector<std::pair<CertificateWish, std::string>> cases = {
      {{"s", kHost, -absl::Hours(2), -absl::Hours(1)}, "certificate verify failed"},
      {{"s", kHost, absl::Hours(1), absl::Hours(2)}, "certificate verify failed"},
      {{"s", "DNS:elsewhere.test"}, "Hostname Verification Check failed"}};
  for (const auto& [wish, reason] : cases) {
    Write("server", authority_.Issue(wish));
    const std::unique_ptr<App> app = Start(Config());
    EXPECT_THAT(Refusal(*app, Files("")), HasSubstr(reason));
  }
}

TEST_F(SecurityTest, AClientWithTlsSendsNothingToAPlaintextServer) {
  ServerConfig config = Config();
  config.tls_cert = config.tls_key = "";
  const std::unique_ptr<App> app = Start(config);
  EXPECT_THAT(Refusal(*app, Files("", kWorkerToken)), HasSubstr("the server may expect plaintext"));
}

TEST_F(SecurityTest, TakesTls12AndLaterAlone) {
  const std::unique_ptr<App> app = Start(Config());
  EXPECT_EQ(SerialAt(app->port(), TLS1_VERSION, TLS1_1_VERSION), -1);
  EXPECT_GT(SerialAt(app->port(), TLS1_2_VERSION, TLS1_2_VERSION), 0);
  EXPECT_GT(SerialAt(app->port(), TLS1_3_VERSION, TLS1_3_VERSION), 0);
}

TEST_F(SecurityTest, StartSaysWhichFileIsWrong) {
  ServerConfig config = MutualConfig();
  config.tls_key = Path("nothing");
  EXPECT_THAT(StartStatus(config).ToString(), AllOf(HasSubstr("NOT_FOUND"), HasSubstr("/nothing: No such file")));
  config.tls_key = Path("worker.key");
  EXPECT_THAT(StartStatus(config).ToString(), HasSubstr("expected the key of the certificate"));
  config.tls_key = Path("ca");
  EXPECT_THAT(StartStatus(config).ToString(), HasSubstr("expected a private key in PEM form"));
  config = MutualConfig();
  config.tls_cert = Path("server.key");
  EXPECT_THAT(StartStatus(config).ToString(), HasSubstr("expected a certificate in PEM form"));
  config = MutualConfig();
  config.tls_client_ca = Path("server.key");
  EXPECT_THAT(StartStatus(config).ToString(), HasSubstr("tls_client_ca"));
  config = MutualConfig();
  config.access_file = Path("access");
  WriteAccess("# no caller is listed\n");
  EXPECT_THAT(StartStatus(config).ToString(), HasSubstr("access: expected at least one caller"));
}

TEST_F(SecurityTest, EachMethodOfEachServiceIsRefusedWithoutAToken) {
  ServerConfig config = Config();
  config.access_file = Path("access");
  WriteAccess(absl::StrCat("worker token ", kWorkerToken));
  const std::unique_ptr<App> app = Start(config);
  const wire::ChannelSecurity security(Files(""));
  const auto channel = grpc::CreateChannel(app->addresses().front(), security.CredentialsFor(app->addresses().front()));
  int methods = 0;
  for (const google::protobuf::FileDescriptor* file :
       {v1::OpenSessionRequest::descriptor()->file(), v1::ExchangeRequest::descriptor()->file(),
        v1::DrainRequest::descriptor()->file(), v1::CreateSnapshotRequest::descriptor()->file(),
        v1::DescribeShardRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m, ++methods) {
        const auto* const method = file->service(s)->method(m);
        const std::string path = absl::StrCat("/", method->service()->full_name(), "/", method->name());
        const grpc::Status status = GenericCall(channel, path, "").End();
        EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << path << ": " << status.error_message();
        EXPECT_THAT(status.error_message(), HasSubstr(path));
      }
    }
  }
  EXPECT_GE(methods, 24);
  EXPECT_EQ(CheckHealth(channel, ""), 1);  // for probes
  EXPECT_EQ(GenericCall(channel, "/precondor.v1.Unknown/Method", "").End().error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(SecurityTest, RolesOfTokensSayWhatACallerMayDo) {
  ServerConfig config = Config();
  config.access_file = Path("access");
  WriteAccess(absl::StrCat("worker token ", kWorkerToken, "\noperator token ", kOperatorToken, "\n"));
  const std::unique_ptr<App> app = Start(config);
  EXPECT_EQ(Connect(*app, Files("")).status().code(), absl::StatusCode::kUnauthenticated);
  const absl::Status unknown = Connect(*app, Files("", "another-token-0123456789")).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(unknown.message()), Not(HasSubstr("0123456789")));
  const absl::Status refused = Ctl(*app, Files("", kWorkerToken), {"sessions"});
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("AdminService/ListSessions: expected a caller with the role operator, got worker")));
  const absl::Status listed = Ctl(*app, Files("", kOperatorToken), {"sessions"});
  EXPECT_TRUE(listed.ok()) << listed;
  const auto client = Connect(*app, Files("", kOperatorToken));
  EXPECT_EQ((*client)->OpenSession(OneLayer()).status().code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(SecurityTest, RolesOfCertificatesSayWhatACallerMayDo) {
  ServerConfig config = MutualConfig();
  config.access_file = Path("access");
  WriteAccess("worker name worker.test\noperator name spiffe://test/operator\noperator name plain\n");
  const std::unique_ptr<App> app = Start(config);
  Write("operator", authority_.Issue({"x", "URI:spiffe://test/operator"}));
  Write("plain", authority_.Issue({"plain", ""}));
  Write("stranger", authority_.Issue({"worker.test", "DNS:stranger.test"}));
  const auto client = Connect(*app, Files("worker"));
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE((*client)->OpenSession(OneLayer()).ok());
  EXPECT_EQ(Ctl(*app, Files("worker"), {"sessions"}).code(), absl::StatusCode::kPermissionDenied);
  for (const char* name : {"operator", "plain"}) {
    const absl::Status listed = Ctl(*app, Files(name), {"sessions"});
    EXPECT_TRUE(listed.ok()) << name << ": " << listed;
  }
  // Its common name is listed, but counts only where there is no alternative name.
  const absl::Status stranger = Connect(*app, Files("stranger")).status();
  EXPECT_EQ(stranger.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(stranger.message()), HasSubstr("a certificate of stranger.test, which is not listed"));
}

// A job can do nothing with the numbers of another that it sees in lists and errors.
TEST_F(SecurityTest, AJobCannotTakePartInAnothersSession) {
  ServerConfig config = Config();
  config.access_file = Path("access");
  const std::string intruder = "intruder-token-0123456789";
  WriteAccess(absl::StrCat("worker@job-a token ", kWorkerToken, "\nworker token ", intruder, "\noperator token ",
                           kOperatorToken, "\n"));
  const std::unique_ptr<App> app = Start(config);
  const auto client = Connect(*app, Files("", kWorkerToken));
  ASSERT_TRUE((*client)->OpenSession(OneLayer()).ok());
  // Another process of the job: it has not opened the session, and knows its name.
  const auto worker = (*Connect(*app, Files("", kWorkerToken)))->Join("test", {0, 7654321});
  ASSERT_TRUE(worker.ok()) << worker.status();
  ExpectStep(**worker, 0);

  Write("intruder", intruder);
  ClientSecurity files = Files("");
  files.token_file = Path("intruder");
  const auto stranger = Connect(*app, files);
  ASSERT_TRUE(stranger.ok()) << stranger.status();
  EXPECT_EQ((*stranger)->OpenSession(OneLayer()).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ((*stranger)->CloseSession("test").status().code(), absl::StatusCode::kPermissionDenied);
  const absl::Status refused = (*stranger)->Join("test", {0, 7654322}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(refused.message()), Not(HasSubstr("7654321")));
  ExpectStep(**worker, 1);
}

TEST_F(SecurityTest, ATenantThatCallsTooOftenWaitsAndOthersDoNot) {
  ServerConfig config = Config();
  config.access_file = Path("access");
  config.tenant_max_calls = 50;
  const std::string greedy = "greedy-token-0123456789";
  WriteAccess(absl::StrCat("worker@job-a token ", kWorkerToken, "\nworker@greedy token ", greedy, "\n"));
  const std::unique_ptr<App> app = Start(config);
  const wire::ChannelSecurity security(Files("", greedy));
  const std::string& address = app->addresses().front();
  const auto channel = grpc::CreateChannel(address, security.CredentialsFor(address));
  const auto ask = [](const std::shared_ptr<grpc::Channel>& asked) {
    GenericCall call(asked, "/precondor.v1.AdminService/GetServerInfo", "");
    call.Read();
    return call.End();
  };
  const auto exhaust = [&] {
    grpc::Status status;
    for (int i = 0; i < 10'000 && status.ok(); ++i) status = ask(channel);
    return status;
  };
  const grpc::Status refused = exhaust();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.error_message(), HasSubstr("at most 50 calls a second"));

  // A client of that tenant repeats what is refused, and trains.
  const auto late = Connect(*app, Files("", greedy));
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_TRUE((*late)->OpenSession(OneLayer()).ok());
  const auto slowed = (*late)->Join("test", {0, 1});
  ASSERT_TRUE(slowed.ok()) << slowed.status();
  for (uint64_t step = 0; step < 3; ++step) {
    EXPECT_EQ(exhaust().error_code(), grpc::StatusCode::UNAVAILABLE);
    ExpectStep(**slowed, step);
  }
  // Another tenant has its own.
  Write("other", kWorkerToken);
  ClientSecurity files = Files("");
  files.token_file = Path("other");
  const wire::ChannelSecurity other(files);
  const auto its_channel = grpc::CreateChannel(address, other.CredentialsFor(address));
  EXPECT_EQ(exhaust().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(ask(its_channel).ok());
}

TEST_F(SecurityTest, AShardTakesOrdersOfACoordinatorAlone) {
  ServerConfig config = Config();
  config.access_file = Path("access");
  WriteAccess(absl::StrCat("worker token ", kWorkerToken, "\ncoordinator token ", kCoordinatorToken, "\n"));
  config.role = ServerRole::kShard;
  const std::unique_ptr<App> shard = Start(config);
  config.role = ServerRole::kCoordinator;
  config.shards = {shard->addresses().front()};
  config.tls_ca = Path("ca");
  config.token_file = Path("coordinator-token");
  Write("coordinator-token", kWorkerToken);
  const std::unique_ptr<App> coordinator = Start(config);
  const auto client = Connect(*coordinator, Files("", kWorkerToken));
  ASSERT_TRUE(client.ok()) << client.status();
  const absl::Status refused = (*client)->OpenSession(OneLayer()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("expected a caller with the role coordinator, got worker"));
  // The next call reads the file.
  Write("coordinator-token", kCoordinatorToken);
  const auto opened = (*client)->OpenSession(OneLayer());
  EXPECT_TRUE(opened.ok()) << opened.status();
}

TEST_F(SecurityTest, ATokenChangesWhileAClientGoesOn) {
  ServerConfig config = Config();
  config.access_file = Path("access");
  WriteAccess(absl::StrCat("worker token ", kWorkerToken));
  const std::unique_ptr<App> app = Start(config);
  const ClientSecurity files = Files("", kWorkerToken);
  const auto client = Connect(*app, files);
  ASSERT_TRUE((*client)->OpenSession(OneLayer()).ok());
  const auto worker = (*client)->Join("test", {0, 1});
  ASSERT_TRUE(worker.ok()) << worker.status();
  ExpectStep(**worker, 0);
  WriteAccess("worker token\n");  // no access list: what was there before counts
  WriteAccess("worker token second-token-0123456789\n");
  EXPECT_TRUE(WaitUntil([&] { return absl::IsUnauthenticated(Connect(*app, files).status()); }));
  Write("token", "second-token-0123456789");
  EXPECT_TRUE(Connect(*app, files).ok());
  ExpectStep(**worker, 1);
  EXPECT_EQ((*worker)->status().traffic.reconnects, 0);
}

TEST_F(SecurityTest, ACertificateChangesWhileAStreamTrains) {
  const std::unique_ptr<App> app = Start(Config());
  const auto client = Connect(*app, Files(""));
  ASSERT_TRUE((*client)->OpenSession(OneLayer()).ok());
  const auto worker = (*client)->Join("test", {0, 1});
  ASSERT_TRUE(worker.ok()) << worker.status();
  ExpectStep(**worker, 0);
  const long serial = SerialAt(app->port(), TLS1_2_VERSION, TLS1_3_VERSION);
  EXPECT_GT(serial, 0);
  Write("server", other_.Issue({.common_name = "server", .names = kHost}));
  EXPECT_TRUE(WaitUntil([&] {
    const long now = SerialAt(app->port(), TLS1_2_VERSION, TLS1_3_VERSION);
    return now > 0 && now != serial;
  }));
  ExpectStep(**worker, 1);
  EXPECT_EQ((*worker)->status().traffic.reconnects, 0);
  // New connections are made with the new certificate, which this client trusts once its own file says so.
  ClientOptions options;
  options.coordinator = app->addresses().front();
  options.security = Files("");
  options.connect_timeout = absl::Milliseconds(300);
  const std::unique_ptr<Client> next = Client::Make(options);
  EXPECT_FALSE(next->WaitForServer().ok());
  Write("ca", other_.pem());
  EXPECT_TRUE(WaitUntil([&] { return next->WaitForServer().ok(); }));
}

TEST_F(SecurityTest, ASocketNeedsNeitherTlsNorToken) {
  ServerConfig config = MutualConfig();
  config.listen = {absl::StrCat("unix:", Path("socket")), "127.0.0.1:0"};
  config.access_file = Path("access");
  WriteAccess(absl::StrCat("worker token ", kWorkerToken));
  const std::unique_ptr<App> app = Start(config);
  const auto client = Connect(*app, ClientSecurity());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE((*client)->OpenSession(OneLayer()).ok());
}

TEST_F(SecurityTest, AClientNamesTheFileThatIsWrong) {
  Write("text", "no certificate");
  const auto refusal = [](const ClientSecurity& files) {
    const absl::Status status = wire::ChannelSecurity(files).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal({.tls_ca = Path("text")}), HasSubstr(absl::StrCat("tls_ca ", Path("text"), ": expected cert")));
  ClientSecurity files = Files("worker");
  files.tls_key = Path("text");
  EXPECT_THAT(refusal(files), HasSubstr(absl::StrCat("tls_key ", Path("text"), ": expected a private key")));
  files.tls_key = Path("server.key");
  EXPECT_THAT(refusal(files), HasSubstr("expected the key of the certificate"));
  EXPECT_EQ(ERR_peek_error(), 0u) << "left for the program's own TLS";
}

TEST_F(SecurityTest, WarnsOfACertificateThatExpiresAndOfFilesThatOthersUse) {
  ServerConfig config = Config();
  config.access_file = Path("access");
  Write("access", "worker token 0123456789abcdef\n");
  // Returns the warnings of a server whose certificate is valid for as long and whose secrets have this mode.
  const auto warnings = [&](absl::Duration left, mode_t mode) {
    Write("server", authority_.Issue({.common_name = "server", .names = kHost, .valid_until = left}));
    for (const std::string& path : {config.tls_key, config.access_file}) EXPECT_EQ(chmod(path.c_str(), mode), 0);
    std::string log;
    const RealClock clock;
    LineLogger logger(LogFormat::kText, Severity::kWarning, clock,
                      [&log](absl::string_view line) { absl::StrAppend(&log, line); });
    auto app = App::Start(config, logger);
    EXPECT_TRUE(app.ok()) << app.status();
    const std::string metrics = (*app)->metrics_text();
    const std::string name = "\nprecondor_certificate_expiry_timestamp_seconds ";
    const size_t begin = metrics.find(name) + name.size();
    double expiry = 0;
    EXPECT_TRUE(absl::SimpleAtod(metrics.substr(begin, metrics.find('\n', begin) - begin), &expiry));
    EXPECT_NEAR(expiry, absl::ToDoubleSeconds(absl::Now() + left - absl::UnixEpoch()), 600);
    app->reset();
    return log;
  };
  EXPECT_EQ(warnings(absl::Hours(25), 0640), "");
  EXPECT_THAT(warnings(absl::Hours(23), 0600), HasSubstr("the certificate expires soon"));
  const std::string all = warnings(-absl::Minutes(1), 0644);
  for (const char* text : {"the certificate has expired", "option=tls_key", "option=access_file", "mode=0644"}) {
    EXPECT_THAT(all, HasSubstr(text));
  }
}

TEST(ChannelSecurityTest, AMissingFileIsNeverPlaintext) {
  const wire::ChannelSecurity security({.tls_ca = "/nothing"});
  EXPECT_EQ(security.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(security.CredentialsFor("127.0.0.1:1"), nullptr);
  const auto client = Client::Connect({.coordinator = "127.0.0.1:1", .security = {.tls_ca = "/nothing"}});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(wire::ReadCredentialFile("tls_ca", "/").status().code(), absl::StatusCode::kNotFound) << "a folder";
  EXPECT_EQ(wire::ReadCredentialFile("tls_ca", "/dev/zero").status().code(), absl::StatusCode::kNotFound) << "no end";
  for (const ClientSecurity& files :
       {ClientSecurity{.token_file = "/dev/null"}, ClientSecurity{.tls_ca = "/dev/null", .tls_cert = "/dev/null"}}) {
    EXPECT_EQ(wire::ChannelSecurity(files).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace precondor
