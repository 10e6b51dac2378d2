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

{{/* Readiness ends in a drain and while a shard replays its log or a coordinator stands by; liveness does not. */}}
{{- define "precondor.probes" -}}
readinessProbe:
  grpc:
    port: {{ . }}
  periodSeconds: 2
  timeoutSeconds: 2
livenessProbe:
  grpc:
    port: {{ . }}
    service: liveness
  initialDelaySeconds: 10
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
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
