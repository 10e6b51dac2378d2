{{- /* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "precondor.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "precondor.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "precondor.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "precondor.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "precondor.selector" -}}
app.kubernetes.io/name: {{ include "precondor.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "precondor.labels" -}}
{{ include "precondor.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "precondor.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "precondor.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "precondor.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{/* Addresses that coordinators and workers dial; $(POD_NAMESPACE) is expanded by the kubelet. */}}
{{- define "precondor.shards" -}}
{{- $name := printf "%s-shard" (include "precondor.fullname" .) -}}
{{- $addresses := list -}}
{{- range until (int .Values.shard.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s.$(POD_NAMESPACE).svc:7071" $name . $name) -}}
{{- end -}}
{{ join "," $addresses }}
{{- end }}

{{/* Options of a server by configuration key, as environment variables. */}}
{{- define "precondor.config" -}}
{{- range $key, $value := . }}
- name: PRECONDOR_{{ upper $key }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{- define "precondor.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "precondor.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Flags: (list $ PORT). With TLS also a socket, which needs neither certificate nor token, for probes and operators. */}}
{{- define "precondor.security" -}}
{{- $tls := (index . 0).Values.tls -}}
- --listen=0.0.0.0:{{ index . 1 }}{{ $tls.secret | empty | ternary "" ",unix:/tmp/precondor.sock" }}
{{- if $tls.secret }}
- --tls-cert=/tls/tls.crt
- --tls-key=/tls/tls.key
{{- if $tls.clientCertificates }}
- --tls-client-ca=/tls/ca.crt
{{- end }}
{{- if $tls.accessSecret }}
- --access-file=/access/access
{{- end }}
{{- else }}
- --plaintext=any
{{- end }}
{{- end }}

{{- define "precondor.securityMounts" -}}
{{- if .Values.tls.secret }}
- name: tls
  mountPath: /tls
  readOnly: true
{{- if .Values.tls.accessSecret }}
- name: access
  mountPath: /access
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{- define "precondor.securityVolumes" -}}
{{- if .Values.tls.secret }}
- name: tls
  secret:
    secretName: {{ .Values.tls.secret }}
    defaultMode: 0440
{{- if .Values.tls.accessSecret }}
- name: access
  secret:
    secretName: {{ .Values.tls.accessSecret }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}

{{/* (list $ PORT). Readiness ends in a drain and while a shard replays its log or a coordinator stands by; liveness does
not. The kubelet's probes of gRPC know no TLS. */}}
{{- define "precondor.probes" -}}
{{- if (index . 0).Values.tls.secret -}}
readinessProbe:
  exec:
    command: [precondorctl, --server=unix:/tmp/precondor.sock, --timeout=5s, health]
  periodSeconds: 5
  timeoutSeconds: 10
livenessProbe:
  exec:
    command: [precondorctl, --server=unix:/tmp/precondor.sock, --timeout=5s, health, liveness]
  initialDelaySeconds: 10
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- else -}}
readinessProbe:
  grpc:
    port: {{ index . 1 }}
  periodSeconds: 2
  timeoutSeconds: 2
livenessProbe:
  grpc:
    port: {{ index . 1 }}
    service: liveness
  initialDelaySeconds: 10
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
{{- end }}

{{- define "precondor.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "precondor.claim" -}}
- apiVersion: v1
  kind: PersistentVolumeClaim
  metadata:
    name: data
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .size }}
{{- end }}
