BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0005');
CREATE TABLE audit (
	entry_id INTEGER NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	event VARCHAR(64) NOT NULL, 
	details JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	CONSTRAINT pk_audit PRIMARY KEY (entry_id)
);
INSERT INTO "audit" VALUES(7,'a tenant_id','a event','{"a": 1}',9.5);
CREATE TABLE checkpoints (
	training_run_id VARCHAR(128) NOT NULL, 
	kind VARCHAR(24) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	error TEXT, 
	directory VARCHAR(256), 
	size_bytes BIGINT, 
	base_model VARCHAR(512) NOT NULL, 
	lora_rank INTEGER NOT NULL, 
	train_attn BOOLEAN NOT NULL, 
	train_mlp BOOLEAN NOT NULL, 
	train_unembed BOOLEAN NOT NULL, 
	optimizer_type VARCHAR(16) NOT NULL, 
	public BOOLEAN NOT NULL, 
	user_metadata JSON, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (training_run_id, kind, name)
);
INSERT INTO "checkpoints" VALUES('a training_run_id','a kind','a name','a tenant_id','a state','a error','a directory',8,'a base_model',7,1,1,1,'a optimizer_type',1,'{"a": 1}',9.5,9.5);
CREATE TABLE custom_losses (
	loss_id VARCHAR(128) NOT NULL, 
	session_id VARCHAR(64) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	definition BLOB NOT NULL, 
	created_at FLOAT NOT NULL, 
	CONSTRAINT pk_custom_losses PRIMARY KEY (loss_id)
);
INSERT INTO "custom_losses" VALUES('a loss_id','a session_id','a tenant_id','a name',X'006279746573FF',9.5);
CREATE TABLE engines (
	base_model VARCHAR(512) NOT NULL, 
	engine_id VARCHAR(64) NOT NULL, 
	pid INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT, 
	started_at FLOAT NOT NULL, holder TEXT DEFAULT '' NOT NULL, epoch BIGINT DEFAULT '0' NOT NULL, lease_expires_at FLOAT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_engines PRIMARY KEY (base_model)
);
INSERT INTO "engines" VALUES('a base_model','a engine_id',7,'a state','a reason',9.5,'a holder',8,9.5);
CREATE TABLE future_bodies (
	request_id VARCHAR(192) NOT NULL, 
	body BLOB NOT NULL, 
	CONSTRAINT pk_future_bodies PRIMARY KEY (request_id)
);
INSERT INTO "future_bodies" VALUES('a request_id',X'006279746573FF');
CREATE TABLE future_results (
	request_id VARCHAR(192) NOT NULL, 
	body BLOB NOT NULL, 
	CONSTRAINT pk_future_results PRIMARY KEY (request_id)
);
INSERT INTO "future_results" VALUES('a request_id',X'006279746573FF');
CREATE TABLE futures (
	arrival INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	request_id VARCHAR(192) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	session_id VARCHAR(64) NOT NULL, 
	base_model VARCHAR(512) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	model_id VARCHAR(128), 
	sampling_session_id VARCHAR(128), 
	seq_id BIGINT, 
	num_tokens INTEGER NOT NULL, 
	error TEXT, 
	category VARCHAR(16), 
	result_type VARCHAR(8), 
	created_at FLOAT NOT NULL, 
	settled_at FLOAT, body_bytes BIGINT DEFAULT '0' NOT NULL, prefill_tokens INTEGER, cached_tokens INTEGER, sampled_tokens INTEGER, settle_order BIGINT, 
	CONSTRAINT uq_futures_model_id_seq_id UNIQUE (model_id, seq_id), 
	CONSTRAINT uq_futures_request_id UNIQUE (request_id), 
	CONSTRAINT uq_futures_sampling_session_id_seq_id UNIQUE (sampling_session_id, seq_id)
);
INSERT INTO "futures" VALUES(7,'a request_id','a tenant_id','a session_id','a base_model','a kind','a state','a model_id','a sampling_session_id',8,7,'a error','a category','a result',9.5,9.5,8,7,7,7,8);
CREATE TABLE keys (
	key_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant_id VARCHAR(64) NOT NULL, 
	name VARCHAR(128) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	created_at FLOAT NOT NULL, 
	revoked_at FLOAT, 
	CONSTRAINT uq_keys_digest UNIQUE (digest)
);
INSERT INTO "keys" VALUES(7,'a tenant_id','a name','a digest',9.5,9.5);
CREATE TABLE models (
	model_id VARCHAR(128) NOT NULL, 
	session_id VARCHAR(64) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	base_model VARCHAR(512) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT, 
	lora_rank INTEGER NOT NULL, 
	lora_seed BIGINT, 
	train_attn BOOLEAN NOT NULL, 
	train_mlp BOOLEAN NOT NULL, 
	train_unembed BOOLEAN NOT NULL, 
	optimizer_type VARCHAR(16) NOT NULL, 
	user_metadata JSON, 
	applied_seq_id BIGINT NOT NULL, 
	snapshot_seq_id BIGINT, 
	snapshot_directory VARCHAR(64), 
	created_at FLOAT NOT NULL, 
	last_request_at FLOAT NOT NULL, project_id VARCHAR(128), previous_snapshot_seq_id BIGINT, previous_snapshot_directory VARCHAR(64), 
	CONSTRAINT pk_models PRIMARY KEY (model_id)
);
INSERT INTO "models" VALUES('a model_id','a session_id','a tenant_id','a base_model','a state','a reason',7,8,1,1,1,'a optimizer_type','{"a": 1}',8,8,'a snapshot_directory',9.5,9.5,'a project_id',8,'a previous_snapshot_directory');
CREATE TABLE samplers (
	sampling_session_id VARCHAR(128) NOT NULL, 
	session_id VARCHAR(64) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	base_model VARCHAR(512) NOT NULL, 
	model_path VARCHAR(512), 
	version_id VARCHAR(512), 
	directory VARCHAR(64), 
	created_at FLOAT NOT NULL, num_clones INTEGER DEFAULT '0' NOT NULL, model_id VARCHAR(128), 
	CONSTRAINT pk_samplers PRIMARY KEY (sampling_session_id)
);
INSERT INTO "samplers" VALUES('a sampling_session_id','a session_id','a tenant_id','a base_model','a model_path','a version_id','a directory',9.5,7,'a model_id');
CREATE TABLE sequences (
	sequence_id VARCHAR(224) NOT NULL, 
	session_id VARCHAR(64) NOT NULL, 
	prompt_tokens INTEGER NOT NULL, 
	sampled_tokens INTEGER NOT NULL, 
	valid_until FLOAT NOT NULL, 
	CONSTRAINT pk_sequences PRIMARY KEY (sequence_id)
);
INSERT INTO "sequences" VALUES('a sequence_id','a session_id',7,7,9.5);
CREATE TABLE sessions (
	session_id VARCHAR(64) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason TEXT, 
	tags JSON NOT NULL, 
	user_metadata JSON, 
	sdk_version VARCHAR(64), 
	project_id VARCHAR(128), 
	display_name TEXT, 
	created_at FLOAT NOT NULL, 
	last_heartbeat_at FLOAT NOT NULL, 
	ended_at FLOAT, 
	closed_at FLOAT, finish_type VARCHAR(16), forgotten_at FLOAT, 
	CONSTRAINT pk_sessions PRIMARY KEY (session_id)
);
INSERT INTO "sessions" VALUES('a session_id','a tenant_id','a state','a reason','{"a": 1}','{"a": 1}','a sdk_version','a project_id','a display_name',9.5,9.5,9.5,9.5,'a finish_type',9.5);
CREATE TABLE tenants (
	tenant_id VARCHAR(64) NOT NULL, 
	quotas JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	CONSTRAINT pk_tenants PRIMARY KEY (tenant_id)
);
INSERT INTO "tenants" VALUES('a tenant_id','{"a": 1}',9.5);
CREATE TABLE usage (
	bucket_start FLOAT NOT NULL, 
	session_id VARCHAR(64) NOT NULL, 
	base_model VARCHAR(512) NOT NULL, 
	type VARCHAR(24) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	quantity BIGINT NOT NULL, 
	CONSTRAINT pk_usage PRIMARY KEY (bucket_start, session_id, base_model, type)
);
INSERT INTO "usage" VALUES(9.5,'a session_id','a base_model','a type','a tenant_id',8);
CREATE INDEX ix_checkpoints_tenant_created ON checkpoints (tenant_id, created_at);
CREATE INDEX ix_futures_session ON futures (session_id);
CREATE INDEX ix_futures_work ON futures (base_model, state, arrival);
CREATE INDEX ix_models_session ON models (session_id);
CREATE INDEX ix_models_tenant_created ON models (tenant_id, created_at);
CREATE INDEX ix_samplers_session ON samplers (session_id);
CREATE INDEX ix_sessions_tenant_created ON sessions (tenant_id, created_at);
CREATE INDEX ix_audit_tenant_created ON audit (tenant_id, created_at);
CREATE INDEX ix_custom_losses_session ON custom_losses (session_id);
CREATE INDEX ix_keys_tenant ON keys (tenant_id);
CREATE INDEX ix_sequences_session ON sequences (session_id);
CREATE INDEX ix_sequences_valid_until ON sequences (valid_until);
CREATE INDEX ix_usage_tenant_bucket ON usage (tenant_id, bucket_start);
CREATE INDEX ix_futures_settle_order ON futures (sampling_session_id, settle_order);
CREATE INDEX ix_samplers_version ON samplers (version_id);
CREATE INDEX ix_sessions_closed_heartbeat ON sessions (closed_at, last_heartbeat_at);
CREATE INDEX ix_sessions_forgotten_closed ON sessions (forgotten_at, closed_at);
CREATE INDEX ix_models_state_tenant ON models (state, tenant_id);
CREATE INDEX ix_futures_tenant_settled ON futures (tenant_id, state, settled_at);
CREATE INDEX ix_samplers_directory ON samplers (directory) WHERE directory IS NOT NULL;
CREATE INDEX ix_checkpoints_expires ON checkpoints (expires_at);
CREATE INDEX ix_audit_created ON audit (created_at);
COMMIT;
