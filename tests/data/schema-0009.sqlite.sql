BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0009');
CREATE TABLE audit (
	entry_id INTEGER NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	event VARCHAR(64) NOT NULL, 
	details JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	CONSTRAINT pk_audit PRIMARY KEY (entry_id)
);
INSERT INTO "audit" VALUES(7,'a tenant_id','a event','{"a": 1}',9.5);
CREATE TABLE batch_job (
	job_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	tenant_id VARCHAR(64) NOT NULL, 
	name TEXT NOT NULL, 
	pool VARCHAR(128) NOT NULL, 
	priority INTEGER NOT NULL, 
	weight FLOAT NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	spec JSON NOT NULL, 
	owner_token VARCHAR(64), 
	owner_holder TEXT, 
	owner_lease_at FLOAT DEFAULT '0' NOT NULL, 
	sealed BOOLEAN NOT NULL, 
	total_rows BIGINT DEFAULT '0' NOT NULL, 
	total_batches BIGINT DEFAULT '0' NOT NULL, 
	completed_batches BIGINT DEFAULT '0' NOT NULL, 
	rows_ok BIGINT DEFAULT '0' NOT NULL, 
	rows_failed BIGINT DEFAULT '0' NOT NULL, 
	tokens_in BIGINT DEFAULT '0' NOT NULL, 
	tokens_out BIGINT DEFAULT '0' NOT NULL, 
	max_failed_rows FLOAT NOT NULL, 
	resume_from BIGINT, 
	root_job_id BIGINT, 
	error TEXT, 
	cleaned BOOLEAN NOT NULL, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT, 
	ended_at FLOAT, 
	updated_at FLOAT NOT NULL
);
INSERT INTO "batch_job" VALUES(7,'a tenant_id','a name','a pool',7,9.5,'a status','{"a": 1}','a owner_token','a owner_holder',9.5,1,8,8,8,8,8,8,8,9.5,8,8,'a error',1,9.5,9.5,9.5,9.5);
CREATE TABLE batch_output (
	job_id BIGINT NOT NULL, 
	output_idx INTEGER NOT NULL, 
	format VARCHAR(64) NOT NULL, 
	path TEXT NOT NULL, 
	rows BIGINT NOT NULL, 
	bytes BIGINT NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	etag TEXT, 
	published_at FLOAT NOT NULL, 
	CONSTRAINT pk_batch_output PRIMARY KEY (job_id, output_idx)
);
INSERT INTO "batch_output" VALUES(8,7,'a format','a path',8,8,'a sha256','a etag',9.5);
CREATE TABLE batch_row_error (
	job_id BIGINT NOT NULL, 
	row_idx BIGINT NOT NULL, 
	attempt_id INTEGER NOT NULL, 
	error_class VARCHAR(128) NOT NULL, 
	message TEXT NOT NULL, 
	details JSON NOT NULL, 
	CONSTRAINT pk_batch_row_error PRIMARY KEY (job_id, row_idx)
);
INSERT INTO "batch_row_error" VALUES(8,8,7,'a error_class','a message','{"a": 1}');
CREATE TABLE batch_state (
	job_id BIGINT NOT NULL, 
	batch_idx BIGINT NOT NULL, 
	start_idx BIGINT NOT NULL, 
	end_idx BIGINT NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	worker_cluster VARCHAR(128), 
	retry_count INTEGER DEFAULT '0' NOT NULL, 
	updated_at FLOAT NOT NULL, 
	parent_idx BIGINT, 
	attempt_id INTEGER DEFAULT '0' NOT NULL, 
	attempt_owner_token VARCHAR(64), 
	lease_expires_at FLOAT, 
	next_retry_at FLOAT, 
	infra_retries INTEGER DEFAULT '0' NOT NULL, 
	parts JSON, 
	rows_ok BIGINT DEFAULT '0' NOT NULL, 
	rows_failed BIGINT DEFAULT '0' NOT NULL, 
	tokens_in BIGINT DEFAULT '0' NOT NULL, 
	tokens_out BIGINT DEFAULT '0' NOT NULL, 
	error_class VARCHAR(128), 
	error TEXT, 
	CONSTRAINT pk_batch_state PRIMARY KEY (job_id, batch_idx)
);
INSERT INTO "batch_state" VALUES(8,8,8,8,'a status','a worker_cluster',7,9.5,8,7,'a attempt_owner_token',9.5,9.5,7,'{"a": 1}',8,8,8,8,'a error_class','a error');
CREATE TABLE batch_worker (
	pool VARCHAR(128) NOT NULL, 
	worker_id VARCHAR(128) NOT NULL, 
	job_id BIGINT NOT NULL, 
	owner_token VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	address TEXT, 
	pid_or_actor VARCHAR(128), 
	state VARCHAR(16) NOT NULL, 
	started_at FLOAT NOT NULL, 
	last_seen_at FLOAT NOT NULL, 
	launch_intent VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_batch_worker PRIMARY KEY (pool, worker_id)
);
INSERT INTO "batch_worker" VALUES('a pool','a worker_id',8,'a owner_token','a kind','a address','a pid_or_actor','a state',9.5,9.5,'a launch_intent');
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
CREATE TABLE curve_points (
	model_id VARCHAR(128) NOT NULL, 
	source VARCHAR(8) NOT NULL, 
	step BIGINT NOT NULL, 
	metrics JSON NOT NULL, 
	recorded_at FLOAT NOT NULL, 
	CONSTRAINT pk_curve_points PRIMARY KEY (model_id, source, step)
);
INSERT INTO "curve_points" VALUES('a model_id','a source',8,'{"a": 1}',9.5);
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
CREATE TABLE files (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	file_id VARCHAR(64) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	filename TEXT NOT NULL, 
	purpose VARCHAR(32) NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	CONSTRAINT uq_files_file_id UNIQUE (file_id)
);
INSERT INTO "files" VALUES(7,'a file_id','a tenant_id','a filename','a purpose',8,'a sha256',9.5,9.5);
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
	settled_at FLOAT, body_bytes BIGINT DEFAULT '0' NOT NULL, prefill_tokens INTEGER, cached_tokens INTEGER, sampled_tokens INTEGER, settle_order BIGINT, started_at FLOAT, ran_at FLOAT, step INTEGER, traceparent VARCHAR(64), 
	CONSTRAINT uq_futures_model_id_seq_id UNIQUE (model_id, seq_id), 
	CONSTRAINT uq_futures_request_id UNIQUE (request_id), 
	CONSTRAINT uq_futures_sampling_session_id_seq_id UNIQUE (sampling_session_id, seq_id)
);
INSERT INTO "futures" VALUES(7,'a request_id','a tenant_id','a session_id','a base_model','a kind','a state','a model_id','a sampling_session_id',8,7,'a error','a category','a result',9.5,9.5,8,7,7,7,8,9.5,9.5,7,'a traceparent');
CREATE TABLE kept_samples (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	request_id VARCHAR(192) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	session_id VARCHAR(64) NOT NULL, 
	base_model VARCHAR(512) NOT NULL, 
	weights VARCHAR(512), 
	prompt_tokens INTEGER NOT NULL, 
	sampled_tokens INTEGER NOT NULL, 
	num_sequences INTEGER NOT NULL, 
	content BLOB NOT NULL, 
	created_at FLOAT NOT NULL
);
INSERT INTO "kept_samples" VALUES(7,'a request_id','a tenant_id','a session_id','a base_model','a weights',7,7,7,X'006279746573FF',9.5);
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
CREATE TABLE openai_batches (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	batch_id VARCHAR(64) NOT NULL, 
	tenant_id VARCHAR(64) NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	endpoint VARCHAR(64) NOT NULL, 
	input_file_id VARCHAR(64) NOT NULL, 
	completion_window VARCHAR(16) NOT NULL, 
	labels JSON, 
	output_expires_s INTEGER, 
	job_id BIGINT, 
	model TEXT, 
	errors JSON, 
	total INTEGER DEFAULT '0' NOT NULL, 
	completed INTEGER DEFAULT '0' NOT NULL, 
	failed INTEGER DEFAULT '0' NOT NULL, 
	usage JSON, 
	output_file_id VARCHAR(64), 
	error_file_id VARCHAR(64), 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT NOT NULL, 
	in_progress_at FLOAT, 
	finalizing_at FLOAT, 
	cancelling_at FLOAT, 
	ended_at FLOAT, 
	CONSTRAINT uq_openai_batches_batch_id UNIQUE (batch_id)
);
INSERT INTO "openai_batches" VALUES(7,'a batch_id','a tenant_id','a status','a endpoint','a input_file_id','a completion_win','{"a": 1}',7,8,'a model','{"a": 1}',7,7,7,'{"a": 1}','a output_file_id','a error_file_id',9.5,9.5,9.5,9.5,9.5,9.5);
CREATE TABLE recent_steps (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	base_model VARCHAR(512) NOT NULL, 
	ended_at FLOAT NOT NULL, 
	duration_s FLOAT NOT NULL, 
	num_passes INTEGER NOT NULL, 
	num_optim_steps INTEGER NOT NULL, 
	num_singles INTEGER NOT NULL, 
	num_tokens BIGINT NOT NULL, 
	shares JSON NOT NULL
);
INSERT INTO "recent_steps" VALUES(7,'a base_model',9.5,9.5,7,7,7,8,'{"a": 1}');
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
CREATE INDEX ix_batch_job_root ON batch_job (root_job_id);
CREATE INDEX ix_batch_job_status ON batch_job (status);
CREATE INDEX ix_batch_job_tenant_id ON batch_job (tenant_id, job_id);
CREATE INDEX ix_batch_state_rows ON batch_state (job_id, start_idx);
CREATE INDEX ix_batch_state_dispatched ON batch_state (lease_expires_at) WHERE status = 'DISPATCHED';
CREATE INDEX ix_batch_state_pending ON batch_state (job_id, start_idx) WHERE status = 'PENDING';
CREATE INDEX ix_batch_worker_job ON batch_worker (job_id);
CREATE INDEX ix_files_tenant ON files (tenant_id, position);
CREATE INDEX ix_files_expires_at ON files (expires_at);
CREATE INDEX ix_openai_batches_tenant ON openai_batches (tenant_id, position);
CREATE INDEX ix_openai_batches_active ON openai_batches (position) WHERE ended_at IS NULL;
CREATE INDEX ix_recent_steps_base ON recent_steps (base_model, position);
CREATE INDEX ix_kept_samples_tenant ON kept_samples (tenant_id, position);
CREATE INDEX ix_kept_samples_request ON kept_samples (request_id);
CREATE INDEX ix_kept_samples_created ON kept_samples (created_at);
COMMIT;
